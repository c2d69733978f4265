"""Processes, mesh and sharding."""
