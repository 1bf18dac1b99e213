"""Evaluates a checkpoint; ``python evaluate.py --help`` lists the commands."""

import sys

if __name__ == "__main__":
    if sys.stderr.isatty():  # importing PyTorch takes seconds; the next line overwrites this one
        print("loading ...", end="\r", file=sys.stderr, flush=True)
    from evaluation.cli import main

    sys.exit(main())
