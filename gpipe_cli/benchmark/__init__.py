"""What times a machine: its reference layers, its links, and the layers of a model."""
