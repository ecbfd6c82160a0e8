"""Typed settings and their checks. Only this package and the commands import Hydra and OmegaConf."""
