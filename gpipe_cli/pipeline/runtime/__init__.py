"""What performs a schedule: executor, stages, transports, and what keeps their results independent of the cut."""
