"""The user's face: the Booster."""
