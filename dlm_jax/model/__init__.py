"""The networks; the only room that knows flax."""
