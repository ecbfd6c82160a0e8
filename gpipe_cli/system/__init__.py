"""What the operating system gives: files, streams, signals, memory, and an end with the parent."""
