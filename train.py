"""Trains a model; see `dlm_jax.cli.train` or ``python train.py --help``."""

from dlm_jax.cli.programs import train

if __name__ == "__main__":
    raise SystemExit(train())
