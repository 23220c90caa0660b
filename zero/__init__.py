"""Everything between gradients that exist and parameters that are updated."""
