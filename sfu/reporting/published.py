"""The tables of the paper, and the published figure that belongs to a cell of ours.

Source: "Towards Source-Free Machine Unlearning", CVPR 2025 (``published.yaml`` beside this file).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sfu.errors import ConfigError
from sfu.reporting.aggregate import number_of

METRICS = ("test_accuracy", "remain_accuracy", "forget_accuracy", "mia")
"""What the paper prints, in its order."""


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper.

    Attributes:
        name: As in ``published=NAME``.
        title: Its number and subject.
        setting: What it was measured on.
        by: The key whose values are its rows; ``None`` if its rows are methods alone.
        ours: Rows of a run that stand beside a published row, if not the one of the same name.
        rows: Published figures by value of ``by`` ("" without) and row, in the order of :data:`METRICS`.
    """

    name: str
    title: str
    setting: str
    by: str | None
    ours: Mapping[str, list[str]]
    rows: Mapping[str, Mapping[str, list[float]]]

    def figure(self, overrides: Mapping[str, str], row: str, metric: str) -> float | None:
        """The published figure for a row of ours at a setting; ``None`` if the paper has none."""
        of_setting = self._setting(overrides)
        if of_setting is None or metric not in METRICS:
            return None
        published = next((name for name, ours in self.ours.items() if row in ours), row)
        figures = of_setting.get(published)
        return None if figures is None else float(figures[METRICS.index(metric)])

    def _setting(self, overrides: Mapping[str, str]) -> Mapping[str, list[float]] | None:
        if self.by is None:
            return self.rows[""]
        given = overrides.get(self.by)
        if given is None:
            return None
        number = number_of(given)
        for value, row in self.rows.items():
            if value == given or (number is not None and number == number_of(value)):
                return row
        return None


@cache
def published_tables() -> dict[str, PublishedTable]:
    """All tables by name."""
    raw: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("published.yaml")))
    return {name: PublishedTable(name, **table) for name, table in raw.items()}


def published_table(name: str) -> PublishedTable:
    """A table of the paper.

    Raises:
        ConfigError: There is no such table.
    """
    tables = published_tables()
    if name not in tables:
        raise ConfigError(f"published={name} is unknown; the paper's tables are {', '.join(tables)}.")
    return tables[name]
