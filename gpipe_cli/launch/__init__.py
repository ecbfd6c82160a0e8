"""Processes: the supervisor starts workers out of a fork server, watches them and stops them together; SLURM."""
