"""A loaded model and its requests: the only subpackage that turns settings into functions."""
