"""What the operating system provides: files, streams, signals, forks, and the machine's cores, memory and GPUs."""
