"""The commands of `gpipe`, each with the line that `gpipe --help` and `gpipe help -k` show."""

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
