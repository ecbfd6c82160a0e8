"""The commands of `gpipe`, each with the line that `gpipe --help` and `gpipe help -k` show, and what has gone."""

COMMANDS = {
    "train": "train a model with GPipe; with -m, one for each of several settings",
    "evaluate": "evaluate a run's checkpoint on its test set, with any partitions",
    "plan": "predict a step: time, bubble, memory; here or on another machine",
    "bench": "measure steps: speed, bubble, memory; with -m a table of settings",
    "check": "prove on your model that pipelining and recomputing change nothing",
    "reproduce": "run tables, figures and results of the paper",
    "compare": "compare runs: settings, versions and results that differ",
    "export": "write a run's model as one file: safetensors, torch, ONNX",
    "site": "write a static site that explains pipelining",
    "list": "list models, datasets, hardware, recipes or runs",
    "help": "explain a setting, a choice, a word or a recipe; with -k find it",
}

# Commands of the previous version -> what to type today.
OLD_COMMANDS = {
    "demo": "use gpipe bench -m partitions=1,2 micro_batches=1,4",
    "launch": "copy a template of recipes/slurm, and submit it by sbatch",
    "diff": "use gpipe compare RUN RUN",
}
# The same for settings, by patterns of `COMMAND setting=value`.
OLD_SETTINGS = {
    "* hydra/sweeper=*": "a sweep runs all combinations; recipes/models.md has a search in ten lines of Python",
    "* partition.balance=*|*": "write the number of layers of each partition, partition.balance=[4,6]",
    "plan solve=memory_time": "compare plans: gpipe plan -m schedule=gpipe,1f1b recompute=always,never",
    "compare output=*": "gpipe compare writes no files; write format=csv > FILE; tensorboard --logdir shows curves",
    "site presets=*": "the explorer has one model; give its settings, gpipe site FOLDER partitions=4",
}
