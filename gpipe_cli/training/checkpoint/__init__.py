"""Training state on disk: written whole, found, checked, restored into any number of partitions."""
