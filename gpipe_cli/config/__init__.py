"""Typed settings and their checks: beside the commands the only place that imports Hydra and OmegaConf."""
