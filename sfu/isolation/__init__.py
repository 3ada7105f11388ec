"""Processes that can reach nothing but what they are given: a server that forks them, and the kernel's sandbox."""
