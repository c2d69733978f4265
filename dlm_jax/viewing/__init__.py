"""Shows the denoising: live in a terminal, or as an HTML page that replays it."""
