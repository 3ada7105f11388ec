"""Links in the documentation lead to files and headings, and its commands compose. Nothing here uses the network."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from sfu.config_files import MAIN_CONFIG, config_dir
from sfu.experiment.config import register, typed_config
from sfu.unlearning.rows import row_specs

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


def prose(text: str) -> str:
    """Return a page without its code, where brackets are not links."""
    unfenced = FENCE.sub("", text)
    lines = [line for line in unfenced.splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", " ", code.group()), "\n".join(lines))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", text), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def broken(page: Path, text: str | None = None) -> list[str]:
    """Return what is wrong with each broken link of a page."""
    wrong = []
    for target in LINK.findall(prose(page.read_text(encoding="utf-8") if text is None else text)):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page if not name else (page.parent / name)
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif path.is_file() and not path.resolve().is_relative_to(ROOT):
            wrong.append(f"{target}: outside the project")
        elif anchor and (path.suffix != ".md" or anchor not in anchors(path.read_text(encoding="utf-8"))):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_can_be_found_from_the_readme() -> None:
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in found and page.suffix == ".md" and page.is_file():
            found.add(page)
            targets = LINK.findall(prose(page.read_text(encoding="utf-8")))
            waiting += [page.parent / target.partition("#")[0] for target in targets if ":" not in target]
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in found}


def test_broken_links_are_found() -> None:
    text = (
        "# A title\n## A title\n[ok](#a-title-1) [no](#b) [gone](docs/gone.md) ![no](x.png) [w](https://x.y/z)\n"
        "[h](docs/metrics.md#rows) [h](docs/metrics.md#columns) `[code](a.md)`\n"
        "```\n[fenced](b.md)\n```\n    [indented](c.md)\n"
    )
    assert anchors(text) == {"a-title", "a-title-1"}
    assert broken(ROOT / "README.md", text) == [
        "#a-title-1: no such heading",  # README has no such heading
        "#b: no such heading",
        "docs/gone.md: no such file",
        "x.png: no such file",
        "docs/metrics.md#columns: no such heading",
    ]


def commands(text: str) -> list[str]:
    """Return the commands of ``sfu`` in a page's code blocks, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r" {4}sfu [^.]*=", line)]


COMMANDS = sorted(
    {line for page in PAGES if page.name != "CONTRIBUTING.md" for line in commands(page.read_text("utf-8"))}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str) -> None:
    arguments = [word for word in shlex.split(command, comments=True)[1:] if not word.startswith(("-", "launcher="))]
    overrides = []
    for one in OverridesParser.create().parse_overrides(arguments):
        value = next(one.sweep_string_iterator()) if one.is_sweep_override() else None
        overrides.append(f"{one.get_key_element()}={value}" if value is not None else str(one.input_line))
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        run = typed_config(compose(MAIN_CONFIG, overrides=overrides))
    assert list(row_specs(run)) == run.methods


def test_the_package_claims_the_python_that_ci_runs_and_no_other():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert claimed == re.findall(r"python(3\.\d+)\}", (ROOT / ".ci" / "run").read_text())
    assert project["requires-python"] == f">={claimed[0]}"
