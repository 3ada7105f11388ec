"""Curvature as something that multiplies and solves: dense, in blocks, or by products with the rows."""
