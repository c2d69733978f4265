"""Tasks of lm-evaluation-harness whose data ships with the package."""
