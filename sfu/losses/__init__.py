"""Convex losses of a linear head and their derivatives: one file a loss, one interface for all."""
