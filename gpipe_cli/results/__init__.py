"""What runs, plans and sweeps write, as types; and the metrics that reports choose from."""
