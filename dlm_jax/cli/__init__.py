"""Command-line programs."""

import os

# Must be set before JAX is imported: otherwise, XLA logs a spurious error about machine features
# for every CPU program that it reads from the compilation cache.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
