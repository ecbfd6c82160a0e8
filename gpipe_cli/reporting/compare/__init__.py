"""Comparison of several runs: `gpipe compare`."""
