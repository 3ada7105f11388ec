"""Experiment loggers: ``none``, ``wandb`` and ``tensorboard``, one dataclass each behind one small interface."""
