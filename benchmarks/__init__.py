"""Benchmarks of Echelon and other libraries: one script per subject, and shared modules."""
