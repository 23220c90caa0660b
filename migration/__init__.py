"""Names of other frameworks that scripts import, and what stands for them here. Imports no torch by itself."""
