"""Trains and evaluates models: ``python train.py fit | validate | test | predict --help``."""

import sys

if __name__ == "__main__":
    if sys.stderr.isatty():  # importing PyTorch takes seconds; the next line overwrites this one
        print("loading ...", end="\r", file=sys.stderr, flush=True)
    try:
        from training import main
    except ModuleNotFoundError as error:
        if error.name not in ("jsonargparse", "lightning", "torch"):
            raise
        sys.exit(f"error: {error}. Activate the environment: source .venv/bin/activate")

    sys.exit(main())
