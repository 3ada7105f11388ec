"""What any page that is mailed must hold to, checked with the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "wbr", "link", "input", "source"}


class Page(HTMLParser):
    """A page's tags, texts and everything wrong with its structure."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len({name for name, _ in attrs}) < len(attrs):
            self.wrong.append(f"<{tag}> repeats an attribute")
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes something else at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def all(self, attribute: str) -> list[str]:
        return [value or "" for _, found in self.tags for name, value in found.items() if name == attribute]

    def images(self) -> list[dict[str, str | None]]:
        return [found for tag, found in self.tags if tag == "img"]


def check(html: str) -> Page:
    """Well-formed, whole in itself, no script, unique ids, links that lead somewhere, a text for every picture."""
    page = Page(html)
    assert page.wrong == []
    ids = page.all("id")
    assert len(set(ids)) == len(ids)
    assert all(link.startswith("#") and link[1:] in ids for link in page.all("href"))
    assert all(name in ids for name in page.all("aria-labelledby"))
    assert all(source.startswith("data:image/png;base64,") for source in page.all("src"))
    assert all(len(image["alt"] or "") > 20 for image in page.images())
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "base", "form"}
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    for outside in ("http:", "https:", "url(", "@import", "//cdn"):
        assert outside not in html.split("</style>")[0]
    assert "https:" not in html
    return page
