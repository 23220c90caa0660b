"""Processes: launch, mesh and process groups, collectives, placements of parameters, random state."""
