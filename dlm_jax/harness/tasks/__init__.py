"""Tasks for lm-evaluation-harness with data in this package."""
