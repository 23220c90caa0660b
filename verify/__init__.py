"""Parity check: a model trained under a layout, compared with one process."""
