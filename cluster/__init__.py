"""Processes: launch, mesh and groups, collectives, how a parameter is split, random state."""
