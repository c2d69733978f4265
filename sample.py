"""Prints texts from a trained model; see `dlm_jax.cli.sample` or ``python sample.py --help``."""

from dlm_jax.cli.sample import main

if __name__ == "__main__":
    raise SystemExit(main())
