"""The YAML of the configuration, installed as `gpipe_cli.conf`; Hydra reads a package only if it has this file."""
