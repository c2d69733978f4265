"""Tasks for lm-evaluation-harness whose data ships with the package."""
