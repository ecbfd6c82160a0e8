"""GPipe itself (section 2 of the paper): the schedule and everything that runs, predicts, checks or draws it.

Plain arguments in: no configuration, no model, no dashboard, no printing. Importing this package imports nothing else;
``schedule``, ``clock``, ``partition``, ``recomputation``, ``simulator``, ``timeline`` and ``breakdown`` need no torch.
"""
