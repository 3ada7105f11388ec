"""Every link in the documentation leads somewhere: files and headings; the network is not asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


def prose(text: str) -> str:
    """A page without its code, in which brackets mean something else."""
    unfenced = FENCE.sub("", text)
    lines = [line for line in unfenced.splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", " ", code.group()), "\n".join(lines))


def anchors(text: str) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", text), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def broken(page: Path, text: str | None = None) -> list[str]:
    """What is wrong with each link of a page."""
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
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in seen and page.suffix == ".md" and page.is_file():
            seen.add(page)
            targets = LINK.findall(prose(page.read_text(encoding="utf-8")))
            waiting += [page.parent / target.partition("#")[0] for target in targets if ":" not in target]
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in seen}


def test_the_check_itself_finds_what_is_broken() -> None:
    text = (
        "# A title\n## A title\n[ok](#a-title-1) [no](#b) [gone](docs/gone.md) ![no](x.png) [w](https://x.y/z)\n"
        "[h](docs/metrics.md#rows) [h](docs/metrics.md#columns) `[code](a.md)`\n"
        "```\n[fenced](b.md)\n```\n    [indented](c.md)\n"
    )
    assert anchors(text) == {"a-title", "a-title-1"}
    assert broken(ROOT / "README.md", text) == [
        "#a-title-1: no such heading",  # of the page as it is
        "#b: no such heading",
        "docs/gone.md: no such file",
        "x.png: no such file",
        "docs/metrics.md#columns: no such heading",
    ]
