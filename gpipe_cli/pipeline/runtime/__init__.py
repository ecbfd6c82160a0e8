"""Performs schedules: executor, stages, transports, and what makes their results independent of the cut."""
