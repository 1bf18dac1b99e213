"""Evaluates a checkpoint; ``python evaluate.py --help`` lists the commands."""

import sys

from evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
