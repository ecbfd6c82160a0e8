"""Reports on a run: console, sinks, result.json."""
