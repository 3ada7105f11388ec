"""Datasets, features and the split into forget and retained examples."""
