"""``python -m dlm_jax.serve``: see `dlm_jax.cli.server`."""

from dlm_jax.cli.programs import serve

if __name__ == "__main__":
    raise SystemExit(serve())
