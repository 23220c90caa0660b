"""Tensor and sequence parallelism: policies, parallel layers, the tables of models."""
