"""The commands: `main(arguments)` of each returns the exit code, and raises InputError for what the user can mend.

Their bodies, which import torch, have files of their own."""
