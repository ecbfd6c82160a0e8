"""GPipe itself (section 2 of the paper): the schedule and everything that runs, predicts, checks or draws it.

Plain arguments in: no settings, no dashboard, no printing. `schedule/` needs no torch.
"""
