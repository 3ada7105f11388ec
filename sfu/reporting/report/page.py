"""The report as one HTML file that needs nothing else: no network, no script, pictures inside, light and dark."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

import sfu
from sfu.reporting import format as fmt
from sfu.reporting.columns import column_of, metrics_in
from sfu.reporting.pictures.choose import Picture
from sfu.reporting.report.build import Report, limits, public
from sfu.reporting.report.grouping import Section
from sfu.reporting.text_tables import cells_of
from sfu.reporting.verdict import verdicts
from sfu.reporting.words import count_of, gaps_in_data, headline, marked, remarks, setting_of
from sfu.results.rows import is_number
from sfu.results.run_folder import FoundRun

if TYPE_CHECKING:
    from markupsafe import Markup

SHOWN = ("distance", "test_accuracy", "remain_accuracy", "forget_accuracy", "mia", "agreement", "seconds")
"""The telling one first: a telephone shows two without scrolling."""
SEES = {"none": "nothing", "forget": "forget set", "stored": "stored summary", "retained": "retained data"}


def html_page(report: Report, drawn: Sequence[tuple[list[Picture], list[str]]], made: datetime | None = None) -> str:
    """Return the whole page.

    Args:
        report: What to say.
        drawn: What ``pictures_of`` returned for each section.
        made: The time in its last line; None: now.
    """
    from jinja2 import Environment, StrictUndefined

    here = resources.files("sfu.reporting.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    template = environment.from_string((here / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=report.title,
        style=(here / "page.css").read_text(encoding="utf-8"),
        sections=[_section(s, *found) for s, found in zip(report.sections, drawn, strict=True)],
        settings=report.settings(),
        versions=report.versions(),
        limits=limits(report),
        troubled=[_run(report, run) for run in report.troubled],
        repeated=[(report.name_of(old), report.name_of(new)) for old, new in report.repeated],
        runs=[_run(report, run) for run in report.runs],
        n_finished=len(report.finished),
        seconds=fmt.seconds(sum(_seconds(run) for run in report.finished)),
        made=f"{made or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        sfu_version=sfu.__version__,
    )


def _section(section: Section, pictures: list[Picture], left_out: list[str]) -> dict[str, Any]:
    table = section.table
    present = metrics_in(table)
    keys = [key for key in SHOWN if key in present]
    groups = [
        {
            "setting": setting_of(group),
            "count": count_of(group),
            "rows": [
                {"name": marked(name, row), "sees": SEES.get(str(row.access), fmt.MISSING), "cells": cells}
                for name, row, cells in cells_of(table, group, keys)
            ],
        }
        for group in table.groups
    ]
    return {
        "title": section.title,
        "verdicts": verdicts(table),
        "headline": headline(table),
        "implied": section.implied,
        "headings": [column_of(key).heading for key in keys],
        "groups": groups,
        "notes": remarks(table),
        "gaps": gaps_in_data(table),
        "pictures": [_picture(picture) for picture in pictures],
        "left_out": left_out,
    }


def _breakable(text: str) -> Markup:
    """A name that may be broken after an underscore."""
    from markupsafe import Markup, escape

    return Markup(str(escape(text)).replace("_", "_<wbr>"))


def _picture(picture: Picture) -> dict[str, str]:
    uris = {
        form: f"data:image/png;base64,{b64encode(png).decode('ascii')}"
        for form, png in (("wide", picture.wide), ("narrow", picture.narrow))
    }
    return {"caption": picture.caption, "alt": picture.alt, "kind": picture.kind, **uris}


def _run(report: Report, run: FoundRun) -> dict[str, str]:
    seconds = _seconds(run)
    return {
        "folder": report.name_of(run),
        "state": run.state,
        "started": "" if run.started is None else f"{run.started:%Y-%m-%d %H:%M}",
        "seconds": fmt.seconds(seconds) if seconds else "",
        "overrides": public(" ".join(f"{key}={value}" for key, value in run.overrides.items())),
        "problem": public(run.problem or ""),
    }


def _seconds(run: FoundRun) -> float:
    seconds = ((run.metrics or {}).get("run") or {}).get("seconds")
    return seconds if is_number(seconds) else 0.0
