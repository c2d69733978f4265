"""Batch sampling: reads a file of requests and writes a file of results."""

from dlm_jax.batch.request_file import Id, Key, Line, RequestFile, share
from dlm_jax.batch.result_file import Results, fingerprint

__all__ = ["Id", "Key", "Line", "RequestFile", "Results", "fingerprint", "share"]
