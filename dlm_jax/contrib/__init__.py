"""Rules and programs that are tested and may change.

The package imports only public names of `dlm_jax`, and no other part of `dlm_jax` imports it. See
docs/contrib.md.
"""
