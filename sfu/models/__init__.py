"""Whole models of PyTorch: the layer that computes their classes, and its inputs for some examples."""
