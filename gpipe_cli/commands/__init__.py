"""One file for each command, the bodies of the commands (which import torch), and what the commands share."""
