"""The report as one HTML file that needs nothing else: no network, no script, pictures inside, light and dark."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

import sfu
from sfu.names import visible
from sfu.reporting import format as fmt
from sfu.reporting import words
from sfu.reporting.columns import DIFFERENCES, cells_of, column_of, compared_rows, difference_cells, metrics_in
from sfu.reporting.pictures.choose import Picture
from sfu.reporting.pictures.drawing import look_of
from sfu.reporting.report.build import Report, limits, public
from sfu.reporting.verdict import closest, harm, ranked, verdicts
from sfu.results.rows import is_number
from sfu.results.run_folder import FoundRun

if TYPE_CHECKING:
    from markupsafe import Markup

SHOWN = ("distance", "test_accuracy", "remain_accuracy", "forget_accuracy", "mia", "agreement", "seconds")
"""Distance comes first, because a telephone shows two columns without scrolling."""
SEES = {"none": "nothing", "forget": "forget set", "stored": "stored summary", "retained": "retained data"}


def html_page(report: Report, drawn: Sequence[tuple[list[Picture], list[str]]]) -> str:
    """Return the whole page; ``drawn`` is what ``pictures_of`` returned for each section."""
    from jinja2 import Environment, StrictUndefined

    here = resources.files("sfu.reporting.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"breakable": _breakable, "public": public, "base64": lambda png: b64encode(png).decode()}
    environment.filters["compared_rows"] = compared_rows
    template = environment.from_string((here / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        sections=list(zip(report.sections, drawn, strict=True)),
        shown=[[key for key in SHOWN if key in metrics_in(section.table)] for section in report.sections],
        tables=[section.table for section in report.sections],
        limits=limits(report),
        seconds_of=lambda run: fmt.seconds(_seconds(run)).replace(fmt.MISSING, ""),
        total_seconds=fmt.seconds(sum(_seconds(run) or 0.0 for run in report.finished)),
        style=(here / "page.css").read_text(encoding="utf-8"),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        sfu_version=sfu.__version__,
        words=words,
        closest=closest,
        ranked=ranked,
        harm=harm,
        verdicts=verdicts,
        look_of=look_of,
        cells_of=cells_of,
        column_of=column_of,
        differences=list(DIFFERENCES),
        difference_cells=difference_cells,
        sees=SEES,
    )


def _breakable(text: str) -> Markup:
    """A name or a key that may be broken after an underscore or a dot, and inside a word only if nothing else helps."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_.])", r"\1<wbr>", str(escape(visible(text)))))


def _shown(value: Any) -> Any:
    """Everything that the page shows passes here; what is markup already is sfu's own."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _seconds(run: FoundRun) -> float | None:
    """How long a run took, where it is known."""
    seconds = ((run.metrics or {}).get("run") or {}).get("seconds")
    return seconds if is_number(seconds) else None
