"""Forward processes of diffusion, training objectives and losses, and bounds of the likelihood."""
