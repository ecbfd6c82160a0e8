"""Typed settings and their checks: the one place, beside the commands, that knows Hydra and OmegaConf."""
