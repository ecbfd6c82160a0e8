"""Training inside a worker process: the training loop, its steps, its data feed, checkpoints."""
