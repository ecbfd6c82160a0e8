"""The commands: `main(arguments)` of each returns the exit code, and raises InputError for what the user can fix.

The parts of a command that import torch are separate modules, imported only when they are needed."""
