"""Print and save the table and picture of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sfu.errors import SfuError
from sfu.experiment.sweep import collect
from sfu.files import write_text
from sfu.results.artifacts import write_json

if TYPE_CHECKING:
    from sfu.reporting.published import PublishedTable


def report_sweep(folder: Path, since: datetime | None = None) -> None:
    """Aggregate the jobs in ``folder`` that started after ``since`` over their seeds, print and save the table.

    It becomes sweep.json, sweep.csv, sweep.md and sweep.png there; with ``published``, ours beside the paper's table is
    printed instead and becomes published.md and published.csv. A failure to write is reported and does not hide the
    jobs' own outcome.
    """
    from sfu.reporting.aggregate import aggregate
    from sfu.reporting.published_table import (
        csv_published_table,
        markdown_published_table,
        terminal_published_table,
    )
    from sfu.reporting.sweep_plot import save_sweep_plot
    from sfu.reporting.sweep_table import csv_sweep_table, markdown_sweep_table, terminal_sweep_table

    runs = collect(folder, since)
    if not runs:
        return
    total, table = aggregate(runs), _published(runs)
    Console().print(terminal_sweep_table(total) if table is None else terminal_published_table(total, table))
    try:
        if table is not None:
            write_text(folder / "published.md", markdown_published_table(total, table))
            write_text(folder / "published.csv", csv_published_table(total, table))
        write_json(folder / "sweep.json", total)
        write_text(folder / "sweep.csv", csv_sweep_table(total))
        write_text(folder / "sweep.md", markdown_sweep_table(total))
        if any("error" not in metrics for _, metrics in runs):
            save_sweep_plot(total, folder / "sweep.png")
    except (SfuError, OSError) as error:
        print(f"sfu: the sweep's table could not be saved: {error}", file=sys.stderr)
        return
    print(f"Saved in {folder}")


def _published(runs: Sequence[tuple[dict[str, str], dict[str, Any]]]) -> PublishedTable | None:
    """The table of the paper that all runs name."""
    from sfu.reporting.published import published_tables

    names = {metrics["run"].get("published") for _, metrics in runs if "run" in metrics}
    return published_tables().get(names.pop() or "") if len(names) == 1 else None
