"""``python -m dlm_jax.export``: see `dlm_jax.cli.export`."""

from dlm_jax.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
