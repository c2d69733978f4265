"""``python -m dlm_jax.serve``: see `dlm_jax.serving.server`."""

from dlm_jax.cli.programs import serve

if __name__ == "__main__":
    raise SystemExit(serve())
