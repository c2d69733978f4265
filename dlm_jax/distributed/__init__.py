"""Processes, mesh and sharding: where arrays live, and what the processes of a run agree on."""
