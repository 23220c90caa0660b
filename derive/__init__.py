"""Derivation by running: small copies of models, traced, with what they show proven by execution."""
