"""What times the layers of a model and the links of a machine."""
