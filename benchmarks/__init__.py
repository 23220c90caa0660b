"""Echelon's speed beside that of others: one script per subject, and what the scripts share."""
