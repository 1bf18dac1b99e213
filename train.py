"""Trains and evaluates models: ``python train.py fit | validate | test | predict --help``."""

import sys

from training import main

if __name__ == "__main__":
    sys.exit(main())
