"""Training state on disk: written atomically, found, checked, restored into any number of partitions."""
