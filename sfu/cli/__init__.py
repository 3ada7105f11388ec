"""The commands ``sfu``, ``sfu-report``, ``sfu-results`` and ``sfu-features``."""
