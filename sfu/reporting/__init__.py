"""What a run or a sweep looks like to a person: tables, pictures, and experiment loggers."""
