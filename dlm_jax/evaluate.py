"""``python -m dlm_jax.evaluate``: see `dlm_jax.cli.evaluation`."""

from dlm_jax.cli.programs import evaluate

if __name__ == "__main__":
    raise SystemExit(evaluate())
