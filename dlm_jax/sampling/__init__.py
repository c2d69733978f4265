"""The denoising loop and the rules in its slots. This package never imports the model."""
