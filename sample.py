"""Prints texts from a trained model; see `dlm_jax.cli.sample` or ``python sample.py --help``."""

from dlm_jax.cli.programs import sample

if __name__ == "__main__":
    raise SystemExit(sample())
