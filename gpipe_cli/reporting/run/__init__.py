"""A run as it is shown: console, TensorBoard, result.json."""
