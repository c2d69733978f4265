"""The networks; the only subpackage that imports flax."""
