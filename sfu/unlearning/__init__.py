"""Unlearning methods, their settings' choice, and the one-call ``unlearn``."""
