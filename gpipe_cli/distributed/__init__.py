"""Between the processes of a run, outside the pipeline: torchrun, process groups, control messages."""
