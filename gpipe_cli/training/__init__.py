"""Training inside a worker: the train loop, its step, its data feed, checkpoints."""
