"""The data of a run: images and text.

Importing this package, or any module of it, imports neither torch nor torchvision: the commands read the settings of
the data before they know whether anything will be loaded. Nothing here knows that a model will be cut into partitions.
"""
