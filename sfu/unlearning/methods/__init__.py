"""Unlearning methods, each registered under the name that ``configs/method`` gives it."""
