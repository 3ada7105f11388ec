"""The errors sfu raises on purpose. Each message names the setting, what was given, and what to do about it."""

from __future__ import annotations


class SfuError(Exception):
    """Base of every error sfu raises on purpose; the command line prints its message without a traceback."""


class ConfigError(SfuError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class DataError(SfuError):
    """A dataset or a forget set cannot be used: missing, malformed, not finite, or inconsistent."""


class SingularHessianError(SfuError):
    """A Hessian that must be inverted is singular to working precision."""


class SourceFreeError(SfuError):
    """A source-free method reached for data that has been discarded."""


class SolverError(SfuError):
    """An optimisation did not reach its tolerance and the caller required it to."""


class TimeLimitError(SfuError):
    """A call took longer than its time limit; nothing was changed."""


class DivergedError(SfuError):
    """An iteration ran away; its weights mean nothing."""


class ArtifactError(SfuError):
    """A saved artifact (head, metrics, split) is missing, corrupt, or of another schema."""


class RankError(SfuError):
    """Another process of a group has failed, died, or does not do the same."""
