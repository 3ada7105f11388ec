"""The commands ``sfu``, ``sfu-plan``, ``sfu-report``, ``sfu-results`` and ``sfu-features``."""
