"""Tests of sfu, each with one thread: the problems are small, and more threads only wait for each other."""

import gc
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and PyTorch start theirs, and for the processes that tests start
if "pytest" in sys.modules:  # and not in a process that a test starts
    gc.disable()  # until the tests are collected: imports would be searched for garbage again and again
