"""Models for lm-evaluation-harness (docs/harness.md)."""
