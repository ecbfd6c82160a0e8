"""The engine for training loops of one's own: `from gpipe_cli import Pipeline`."""
