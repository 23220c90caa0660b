"""Predicted memory and step time of layouts, without processes and without weights."""
