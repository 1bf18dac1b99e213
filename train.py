"""Trains and evaluates models: ``python train.py fit | validate | test | predict --help``."""

import sys

if __name__ == "__main__":
    if sys.stderr.isatty():  # importing PyTorch takes seconds; the next line overwrites this one
        print("loading ...", end="\r", file=sys.stderr, flush=True)
    from training import main

    sys.exit(main())
