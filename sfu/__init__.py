"""Source-free machine unlearning for PyTorch."""

__version__ = "0.1.0"
