"""Reports on runs and plans for people and for later commands, made in the parent process of the workers."""
