"""A package only so that wheels carry the YAML beside it; see [tool.setuptools] in pyproject.toml."""
