"""The commands of `gpipe`, each with the line that `gpipe --help` and `gpipe help -k` show."""

COMMANDS = {
    "train": "train a model with GPipe, or with -m a sweep over settings",
    "bench": "measure steps: speed, bubble, memory, FLOP/s; with -m a table of settings",
    "plan": "predict a step without running it: time, bubble, memory; for this machine or another",
    "evaluate": "evaluate a run's checkpoint on its test set, with any number of partitions",
    "export": "write a run's model as one file for other programs: safetensors, torch, ONNX",
    "check": "prove on your own model that partitions, schedules and recomputation change nothing",
    "reproduce": "run tables, figures and results of the paper, at the scale that the machine allows",
    "compare": "compare runs: a table of the settings, versions and results that differ",
    "site": "write a static site that explains pipelining, with a plan to explore",
    "list": "list models, datasets, hardware, recipes or runs",
    "help": "explain a setting, a choice, a word or a recipe; with -k find them",
}
