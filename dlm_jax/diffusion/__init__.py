"""The forward process of masked diffusion, its loss, and the likelihood it bounds."""
