"""A report on any number of runs: which belong together, what they say, tables, pictures, and one page to mail."""
