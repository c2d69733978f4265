"""Programs of the command line."""

import os

# Before JAX is imported. XLA logs an error for every CPU program that it reads from the cache of
# compiled programs, about a preference of the compiler that it takes for a feature of the machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
