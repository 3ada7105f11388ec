"""Run the commands of README.md and docs/ again, and compare the figures on the pages with what comes out.

    python scripts/check_docs.py                                  # figures that need no data and little time
    python scripts/check_docs.py --features cifar10_512.npz       # and those on CIFAR-10's features
    python scripts/check_docs.py --features cifar10_512.npz --images cifar10_images --all    # and those that take long
    python scripts/check_docs.py --list                           # what each marker needs; runs nothing
    python scripts/check_docs.py --update README.md               # write what was measured into its tables

It prints a line for each figure. The exit code is 1 if a figure is off, and 2 if a command or a marker does not work.

A page marks its figures by comments, which readers do not see. They stand before a table, or after a text with figures:

    <!-- check: sfu experiment=paper_table_1 | where tune=authors -->
    <!-- check: sfu -m seed | 0.184 = closed_form.distance head.l2=5e-4 | 1.2 = /worst (\\S+)/ -->

A marker begins like a command that a code block shows, on the same page or on one page alone. Options follow, separated
by bars: ``where KEY=VALUE ...`` selects runs, ``spread NUMBER`` is the spread of all figures, ``se`` says that standard
errors follow ±, ``long`` leaves the marker to ``--all``, ``first COMMAND`` runs another command before, and ``printed``
compares the table with one that the command prints. After a text, claims follow: a figure of that text, ``=``, ``<=``
or ``>=``, and either a metric of a row, with settings of its runs, or a pattern that finds numbers in what the command
prints. ``max``, ``min`` and ``abs`` before a metric take the largest, the smallest or absolute values.

A figure is off if it differs by more than its spread and what its last digit stands for. Its spread is what follows its
±, else ``spread``, else the standard deviation (with ``se``, the standard error) over the seeds of the run. A figure
after ± is off if it differs by more than half. Tables with figures that cannot be run again say why:
``<!-- not checked: REASON -->``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sfu.results.rows import flat_items, is_number, rows_of
from sfu.results.run_folder import read_run, run_folders

ROOT = Path(__file__).resolve().parents[1]
FEATURES, IMAGES = "cifar10_512.npz", "cifar10_images"
COMMANDS = {"python": "", "sfu": "-m sfu", "sfu-features": "-m sfu.cli.features", "sfu-plan": "-m sfu.cli.plan"}
KEYS = {
    "request": "request",
    "fraction": "forget.fraction",
    "P": "curvature.perturbations",
    "l2": "head.l2",
    "loss": "loss.name",
}
METRICS = {
    "test": "test_accuracy", "remaining": "remain_accuracy", "forget": "forget_accuracy", "MIA": "mia",
    "canary": "canary_accuracy", "distance": "distance", "distance to Retrained": "distance",
    "weight distance": "weight_distance",
    "forget JS": "forget_js", "forget margin": "forget_margin_difference", "test margin": "test_margin_difference",
    "KLoM forget": "klom.forget.mean", "KLoM test": "klom.test.mean",
    "Hessian error": "theory.lemma_1.measured", "Lemma 1": "theory.lemma_1.bound",
    "retain gradient": "theory.residual.measured", "identity": "theory.residual.bound",
    "nothing done": "theory.residual.trivial", "Theorem 1": "theory.theorem_1.bound",
    "with 1/lambda_min": "theory.theorem_1.bound_smallest_eigenvalue",
}  # fmt: skip
RULES = ("authors", "source_free", "oracle")
UNCHECKED = ("sees", "seconds", "MB")
OPTIONS = ("where", "spread", "se", "long", "first", "printed")
MARKER = re.compile(r"<!-- (check|not checked): (.*?) -->", re.S)
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
ROUNDING = 1e-8  # claims below are rounding errors, of which only the size can be compared


class MarkerError(Exception):
    """A marker that cannot be understood, or whose command does not run."""


@dataclass(frozen=True)
class Figure:
    """A number as a page prints it.

    Attributes:
        text: Its digits.
        unit: What one step of its last digit stands for.
        spread: What follows its ±.
        place: Where it and its spread stand in the page; ``None`` outside tables.
    """

    text: str
    unit: float
    spread: float | None = None
    place: tuple[int, int] | None = None

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))


@dataclass(frozen=True)
class Claim:
    """A figure and what it is said to be."""

    figure: Figure
    what: str
    where: dict[str, str]
    relation: str = "="


@dataclass
class Marked:
    """One marker: the command, its options, and what the page claims."""

    page: Path
    line: int
    command: str
    options: dict[str, str]
    claims: list[Claim] = field(default_factory=list)

    @property
    def needs(self) -> set[str]:
        """What must be given: ``--features``, ``--images``, ``--all``."""
        text = f"{self.options.get('first', '')} {self.command}"
        found = {"--features" if FEATURES in text else "", "--images" if IMAGES in text else ""}
        return (found | ({"--all"} if "long" in self.options else set())) - {""}


# --- pages


def figures_of(cell: str, start: int = 0) -> list[Figure]:
    """Return the numbers of a table's cell, without what stands in brackets; ``start`` is the cell's place."""
    plain = re.sub(r"\([^)]*\)", lambda found: " " * len(found[0]), cell.replace("*", " "))
    figures = []
    for found in re.finditer(rf"(?<![\w.-])({NUMBER})(?: ± ({NUMBER}))?", plain):
        spread = float(found[2].replace(",", "")) if found[2] else None
        figures.append(Figure(found[1], unit_of(found[1]), spread, (start + found.start(), start + found.end())))
    return figures


def unit_of(text: str) -> float:
    """Return what one step of the last digit stands for: 0.1 for ``72.6``, 1e-6 for ``5e-6``."""
    mantissa, _, power = text.replace(",", "").partition("e")
    return 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))


def shown_commands(text: str) -> list[str]:
    """Return the commands in a page's code blocks, with continued lines joined and comments removed."""
    blocks = re.findall(r"^ {4}\S.*$", re.sub(r"\\\n\s*", "", text), re.M)
    return [re.sub(r"\s{2,}#.*$| # .*$", "", line.strip()) for line in blocks]


@functools.cache
def commands_of(page: Path) -> list[str]:
    return shown_commands(page.read_text(encoding="utf-8"))


def find_command(start: str, page: Path, pages: list[Path]) -> str:
    """Return the one command that begins so, on this page or else on all."""
    for some in ([page], pages):
        shown = {line for one in some for line in commands_of(one)}
        found = {start} & shown or {line for line in shown if line.startswith(start)}
        if len(found) == 1:
            return found.pop()
        if found:
            raise MarkerError(f"several commands begin with '{start}': {', '.join(sorted(found))}")
    raise MarkerError(f"no page shows a command that begins with '{start}'")


def markers_of(page: Path, pages: list[Path]) -> Iterator[Marked]:
    """Yield the markers of a page with all that they claim."""
    text = page.read_text(encoding="utf-8")
    for found in MARKER.finditer(text):
        if found[1] != "check":
            continue
        line = text.count("\n", 0, found.start()) + 1
        try:
            start, *parts = [part.strip() for part in " ".join(found[2].split()).split(" | ")]
            marked = Marked(page, line, find_command(start, page, pages), {})
            claimed = []
            for part in parts:
                name, _, value = part.partition(" ")
                if name in OPTIONS:
                    marked.options[name] = find_command(value, page, pages) if name == "first" else value
                else:
                    claimed.append(part)
            where = dict(item.split("=", 1) for item in marked.options.get("where", "").split())
            before = text[: found.start()].rstrip().rsplit("\n\n", 1)[-1]
            marked.claims += [text_claim(one, before, where) for one in claimed]
            if not claimed:
                table = Table.first_of(text, found.end())
                marked.claims += printed_claims(table) if "printed" in marked.options else table_claims(table, where)
        except MarkerError as error:
            raise MarkerError(f"{page.name}:{line}: {error}.") from error
        yield marked


def text_claim(claim: str, before: str, where: dict[str, str]) -> Claim:
    """Return a claim after text, such as ``0.184 = closed_form.distance head.l2=5e-4``."""
    found = re.fullmatch(rf"({NUMBER}) (=|<=|>=) (/.*/|(?:(?:max|min|abs) )*[\w.]+)((?: [\w.]+=\S+)*)", claim)
    if found is None:
        raise MarkerError(f"'{claim}' is no claim")
    if not re.search(rf"(?<![\d.,]){re.escape(found[1])}(?![\d]|[.,]\d)", before):
        raise MarkerError(f"the text before the marker does not say {found[1]}")
    more = dict(item.split("=", 1) for item in found[4].split())
    return Claim(Figure(found[1], unit_of(found[1])), found[3], where | more, found[2])


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and the figures in it."""

    text: str
    figures: list[Figure]


@dataclass(frozen=True)
class Table:
    """A Markdown table: the header's cells, and those of each line."""

    header: list[str]
    body: list[list[Cell]]

    @classmethod
    def first_of(cls, text: str, start: int = 0) -> Table:
        """Return the first table of a text that begins at ``start``, if there is only white space before it."""
        place = start + len(text[start:]) - len(text[start:].lstrip())
        rows = []
        for line in text[place:].splitlines(keepends=True):
            if not line.startswith("|"):
                break
            edges = [place + found.start() for found in re.finditer(r"(?<!\\)\|", line)]
            rows.append([(text[one + 1 : end], one + 1) for one, end in itertools.pairwise(edges)])
            place += len(line)
        if len(rows) < 3:
            raise MarkerError("no table follows the marker")
        header, _, *body = rows
        cells = [[Cell(cell.strip(), figures_of(cell, place)) for cell, place in row] for row in body]
        return cls([cell.strip() for cell, _ in header], cells)


def printed_claims(table: Table) -> list[Claim]:
    """Return what a table claims that the command prints, too: what each cell says is its place there."""
    return [
        Claim(figure, f"#{number}.{column}.{place} of |{'|'.join(table.header)}|", {})
        for number, row in enumerate(table.body)
        for column, cell in enumerate(row)
        for place, figure in enumerate(cell.figures)
    ]


def printed_value(printed: str, what: str) -> list[float]:
    """Return the number at such a place of the printed table with this header."""
    place, _, header = what.removeprefix("#").partition(" of ")
    row, column, number = map(int, place.split("."))
    for block in re.findall(r"(?:^\|.*\n)+", printed + "\n", re.M):
        table = Table.first_of(block) if block.count("\n") > 2 else None
        if table is not None and f"|{'|'.join(table.header)}|" == header and row < len(table.body):
            figures = table.body[row][column].figures
            return [figures[number].value] if number < len(figures) else []
    return []


def table_claims(table: Table, where: dict[str, str]) -> list[Claim]:
    """Return what a table of rows and metrics claims."""
    columns = [column_of(name) for name in table.header]
    claims = []
    for row in table.body:
        keys, name = dict(where), ""
        for (kind, value), cell in zip(columns, row, strict=True):
            code = re.search(r"`([^`]+)`", cell.text)
            if kind == "key":
                keys[value] = code[1] if code else cell.text
            elif kind == "name":
                name = code[1] if code else ""
        for number, ((kind, value), cell) in enumerate(zip(columns, row, strict=True)):
            if kind == "rule":
                parts = [(f"{name}.distance", {"tune": value})]
            elif kind == "metric":
                parts = [(f"{name}.{value}", {})]
            elif kind == "row":
                metrics = ("test_accuracy", "forget_accuracy", "distance")[-len(cell.figures) :]
                parts = [(f"{value}.{metric}", {}) for metric in metrics]
            else:
                continue
            if len(cell.figures) != len(parts) and cell.text:
                raise MarkerError(f"'{cell.text}' holds {len(cell.figures)} figures, not {len(parts)}")
            column = [figure.unit for line in table.body for figure in line[number].figures if "e" not in figure.text]
            for figure, (what, rule) in zip(cell.figures, parts, strict=False):
                if figure.text in ("0", "1"):  # exactly so by definition
                    figure = replace(figure, unit=min(column))
                claims.append(Claim(figure, what, keys | rule))
    return claims


def column_of(name: str) -> tuple[str, str]:
    """Return what a column holds: the row's name, a key, a metric, distances by rule, or nothing that is checked."""
    code = re.search(r"`([^`]+)`", name)
    if name in ("row", "method"):
        return "name", ""
    if name in KEYS or (code and code[1] in KEYS):
        return "key", KEYS[code[1] if code else name]
    if name in METRICS:
        return "metric", METRICS[name]
    if name in UNCHECKED:
        return "unchecked", ""
    if code:
        return ("rule" if code[1] in RULES else "row"), code[1]
    raise MarkerError(f"the column '{name}' is unknown to scripts/check_docs.py")


def unmarked_tables(page: Path) -> Iterator[str]:
    """Yield the header of each table that holds figures, and that no marker says how to check, or why not."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^ *\|.*\n?)+", text, re.M):
        body = "\n".join(found[0].splitlines()[2:])
        before, after = text[: found.start()].rstrip(), text[found.end() :].lstrip()
        if any("." in one.text for one in figures_of(body)) and not (
            before.endswith("-->") or after.startswith("<!--")
        ):
            yield f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0].splitlines()[0]}"


# --- commands


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its runs: the configuration and the rows of each."""

    printed: str
    runs: list[tuple[dict[str, Any], dict[str, Any]]]

    def values(self, what: str, where: dict[str, str]) -> list[float]:
        """Return the values of ``ROW.METRIC`` in the runs that have the settings, or what a pattern or place finds."""
        if what.startswith("/"):
            found = re.findall(what[1:-1], self.printed, re.M)
            return [float(one) for one in found if re.fullmatch(NUMBER, one)]
        if what.startswith("#"):
            return printed_value(self.printed, what)
        *how, path = what.split()
        row, _, metric = path.partition(".")
        runs = [rows for config, rows in self.runs if all(same(config.get(key), text) for key, text in where.items())]
        values = [rows[row][metric] for rows in runs if is_number(rows.get(row, {}).get(metric))]
        if "abs" in how:
            values = [abs(value) for value in values]
        if values and ("max" in how or "min" in how):
            values = [max(values) if "max" in how else min(values)]
        return values


def same(value: Any, text: str) -> bool:
    """Return whether a setting has a value, as numbers or as text."""
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


class Runner:
    """Runs each command once, in a folder of its own, with this checkout's code and an empty cache."""

    def __init__(self, work: Path, links: dict[str, Path]) -> None:
        self._work, self._links, self._done = work, links | {"scripts": ROOT / "scripts"}, 0
        programs = work / "bin"
        programs.mkdir()
        for name, module in COMMANDS.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            program.chmod(0o755)
        self._environment = {
            **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "SFU_CACHE": str(work / "cache"), "WANDB_MODE": "disabled", "COLUMNS": "200",
        }  # fmt: skip
        self.run = functools.cache(self._run)

    def _run(self, command: str, first: str) -> Outcome:
        self._done += 1
        folder = self._work / str(self._done)
        folder.mkdir()
        for name, target in self._links.items():
            (folder / name).symlink_to(target)
        printed = ""
        for line in filter(None, (first, command)):
            done = subprocess.run(
                ["bash", "-c", line], cwd=folder, env=self._environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            printed = done.stdout
            if done.returncode:
                raise MarkerError(f"'{line}' ended with exit code {done.returncode}:\n{printed[-1000:]}")
        outputs = folder / "outputs"
        found = [read_run(one, with_config=True) for one in run_folders(outputs)] if outputs.exists() else []
        runs = [
            (
                {**one.overrides, **dict(flat_items(one.config or {}))},
                {name: dict(flat_items(row)) for name, row in rows_of(one.metrics).items()},
            )
            for one in found
            if one.metrics
        ]
        return Outcome(printed, runs)


# --- the comparison


def check(claim: Claim, outcome: Outcome, options: dict[str, str]) -> tuple[str, bool, str]:
    """Return a line about a figure, whether it holds, and what the page would say by this measurement."""
    values, figure = outcome.values(claim.what, claim.where), claim.figure
    if not values:
        raise MarkerError(f"the command gives no {claim.what} {claim.where or ''}")
    measured = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    shown = deviation / math.sqrt(len(values)) if "se" in options else deviation
    spread = float(options.get("spread", shown if figure.spread is None else figure.spread))
    tolerance = spread + 0.5001 * figure.unit
    if claim.relation != "=":
        holds = figure.value >= measured if claim.relation == ">=" else figure.value <= measured
    elif 0 < figure.value < ROUNDING:
        holds = measured <= 10 * figure.value
    else:
        holds = abs(measured - figure.value) <= tolerance
    if figure.spread is not None:
        holds &= abs(shown - figure.spread) <= 0.5001 * figure.unit + 0.5 * max(shown, figure.spread)
    where = " ".join(f"{key}={value}" for key, value in claim.where.items())
    claimed = figure.text if figure.spread is None else f"{figure.text} ± {figure.spread:g}"
    got = f"{measured:.6g}" + (f" ± {shown:.2g}" if len(values) > 1 else "")
    relation = "" if claim.relation == "=" else f"{claim.relation} "
    line = f"{claim.what} {where}: claimed {relation}{claimed}, measured {got}, spread {spread:.2g}"
    return line, holds, as_shown(figure, measured, shown)


def as_shown(figure: Figure, measured: float, spread: float) -> str:
    """Return a measurement as the page shows the figure; rounding errors and what is 0 or 1 by definition stay."""
    if figure.value < ROUNDING or figure.text == "1":
        return figure.text
    if "e" in figure.text:
        digits = len(figure.text.partition("e")[0].partition(".")[2])
        mantissa, _, power = f"{measured:.{digits}e}".partition("e")
        return f"{mantissa}e{int(power)}"
    digits = len(figure.text.partition(".")[2])
    return f"{measured:,.{digits}f}" + ("" if figure.spread is None else f" ± {spread:,.{digits}f}")


def update(page: Path, changes: dict[tuple[int, int], str]) -> None:
    """Write new figures into a page."""
    text = page.read_text(encoding="utf-8")
    for (start, end), new in sorted(changes.items(), reverse=True):
        text = text[:start] + new + text[end:]
    page.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Check the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files (default: README.md and docs/*.md)")
    parser.add_argument("--features", type=Path, metavar="FILE", help=f"CIFAR-10's features, on pages {FEATURES}")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help=f"CIFAR-10's images, on pages {IMAGES}")
    parser.add_argument("--all", action="store_true", help="also what takes long")
    parser.add_argument("--update", action="store_true", help="write what was measured into tables; texts stay")
    parser.add_argument("--list", action="store_true", help="say what each marker needs, and run nothing")
    given = parser.parse_args(arguments)
    known = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages = [page.resolve() for page in given.pages] or known
    links = {name: path.resolve() for name, path in ((FEATURES, given.features), (IMAGES, given.images)) if path}
    have = {name for name in ("features", "images", "all") if getattr(given, name)}
    off = broken = checked = left = 0
    with tempfile.TemporaryDirectory(prefix="sfu-check-docs-") as work:
        runner = Runner(Path(work), links)
        for page in pages:
            text, changes = page.read_text(encoding="utf-8"), dict[tuple[int, int], str]()
            try:
                marked = list(markers_of(page, list(dict.fromkeys([*pages, *known]))))
            except MarkerError as error:
                print(error, flush=True)
                broken += 1
                continue
            for one in marked:
                place = f"{page.name}:{one.line}"
                if given.list:
                    print(
                        f"{place}: {len(one.claims)} figures, {' '.join(sorted(one.needs)) or 'always'}: {one.command}"
                    )
                    continue
                if not {need.removeprefix("--") for need in one.needs} <= have:
                    left += len(one.claims)
                    continue
                try:
                    outcome = runner.run(one.command, one.options.get("first", ""))
                    for claim in one.claims:
                        line, holds, new = check(claim, outcome, one.options)
                        if claim.figure.place is not None:
                            changes[claim.figure.place] = new
                        checked, off = checked + 1, off + (not holds)
                        print(f"{place} {line}, {'ok' if holds else 'OFF'}", flush=True)
                except MarkerError as error:
                    print(f"{place}: {error}", flush=True)
                    broken += 1
            if given.update and page.read_text(encoding="utf-8") == text:  # places of another text are wrong
                update(page, changes)
    print(f"{checked} figures checked, {off} off; {broken} markers do not work; {left} figures need more options.")
    return 2 if broken else int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
