"""Reports on a run: console, loggers, result.json."""
