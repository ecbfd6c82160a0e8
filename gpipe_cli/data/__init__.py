"""The data of a run: images and text. Nothing here knows that a model will be cut into partitions."""
