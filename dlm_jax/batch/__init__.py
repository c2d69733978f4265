"""Batch sampling: reads a file of requests and writes a file of results."""

from dlm_jax.batch.json_lines import Line, RequestFile, Results, fingerprint

__all__ = ["Line", "RequestFile", "Results", "fingerprint"]
