"""The denoising loop and the functions in its slots; it never imports the model."""
