"""`python -m gpipe_cli` is `gpipe`: what torchrun and the runs of a sweep start."""

import sys

from gpipe_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
