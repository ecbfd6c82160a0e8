"""The engine for a program's own training loop: `from gpipe_cli import Pipeline`."""
