"""The networks of the paper (Sections 3 to 5), as sequences of named layers; nothing here depends on partitions."""
