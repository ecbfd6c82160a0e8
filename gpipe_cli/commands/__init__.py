"""One file for each command, and what they share: the command line, processes, folders, sweeps."""
