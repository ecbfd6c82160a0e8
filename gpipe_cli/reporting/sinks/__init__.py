"""Where the curves, settings, texts and pictures of a run go: one file for each value of the setting `logger`."""
