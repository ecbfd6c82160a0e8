"""Starts workers from a fork server, watches them and stops them together."""
