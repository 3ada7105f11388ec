"""What may be seen, the Newton step, and one file per method."""
