"""Files of requests in, files of results out: what batch sampling reads and keeps on disk."""

from dlm_jax.batch.request_file import Id, Key, Line, read_requests, share
from dlm_jax.batch.result_file import Results, fingerprint

__all__ = ["Id", "Key", "Line", "Results", "fingerprint", "read_requests", "share"]
