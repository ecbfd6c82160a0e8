"""Loggers of the curves, settings, texts and pictures of a run: one module for each value of the setting `logger`."""
