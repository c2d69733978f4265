"""A loaded model and its requests: the only subpackage that maps settings to functions."""
