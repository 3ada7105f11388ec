"""How results are shown: tables, pictures, reports, and experiment loggers."""
