"""The denoising loop and its rules. This package never imports the model."""
