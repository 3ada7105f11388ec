"""Datasets: one dataclass each, whose fields are its settings; see :mod:`sfu.data.datasets.base`."""
