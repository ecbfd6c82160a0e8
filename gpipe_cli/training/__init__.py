"""Training: from typed settings to a finished run. `run.py` tells the story of a process, `processes.py` starts
them."""
