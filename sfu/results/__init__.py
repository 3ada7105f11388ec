"""The results of runs: their folders, their rows, and tables of rows averaged over runs."""
