"""``python -m qfleet …`` is ``qfleet …``; torchrun starts it so."""

import sys

from qfleet.cli.main import program

if __name__ == "__main__":
    sys.exit(program())
