"""The experiments of the paper, one recipe each: which commands to run, and its numbers beside ours."""
