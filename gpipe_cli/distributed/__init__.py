"""Connects the processes of a run: torchrun's variables, rendezvous, process groups, control messages, heartbeat."""
