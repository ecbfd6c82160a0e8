"""The experiments of the paper, one recipe each: the commands to run, and the paper's numbers beside ours."""
