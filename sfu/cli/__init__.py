"""The commands ``sfu``, ``sfu-unlearn``, ``sfu-plan``, ``sfu-report``, ``sfu-results`` and ``sfu-features``."""
