"""The experiments of the paper, a recipe for each: the commands to run, and the paper's numbers next to ours."""
