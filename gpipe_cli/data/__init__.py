"""The data of a run: images and text. Nothing here depends on partitions."""
