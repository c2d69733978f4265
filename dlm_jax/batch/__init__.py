"""Batch sampling: reads a file of requests and writes a file of results."""

from dlm_jax.batch.json_lines import Id, Key, Line, RequestFile, Results, fingerprint, share

__all__ = ["Id", "Key", "Line", "RequestFile", "Results", "fingerprint", "share"]
