"""Classifier heads and their training to the optimum."""
