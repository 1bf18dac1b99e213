"""Evaluates a checkpoint: ``python evaluate.py perplexity | generate | import --help``."""

import sys

from evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
