"""Tests of sfu, each with one thread: the problems are small, and more threads only wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and PyTorch start theirs, and for the processes that tests start
