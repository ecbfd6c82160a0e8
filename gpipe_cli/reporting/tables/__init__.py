"""Tables of commands: plan, check, bench, sweeps, recipes."""
