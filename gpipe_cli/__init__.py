"""GPipe (Huang et al., 2019): micro-batch pipeline parallelism, as a training application for the command line."""
