"""The echelon command."""
