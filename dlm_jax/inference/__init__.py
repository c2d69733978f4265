"""A loaded model and its requests: the only room that turns settings into functions."""
