"""The attacks of `benchmarks/attack.py`, one module each."""
