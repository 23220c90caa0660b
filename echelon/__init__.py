"""Echelon trains Hugging Face transformers over many processes. This module only exports the public names."""

__version__ = "0.1.0"
