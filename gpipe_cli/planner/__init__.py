"""Plans a run before anything is allocated: layer costs, cut, memory of stages, step time, choice of settings."""
