"""Checks that every link of a built site that stays on it leads to a file and a place in that.

    python docs/check_links.py build/docs

Links to other sites need a network: ``make docs-links``.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the places of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places.update(filter(None, (given.get("id"), given.get("name"))))
        self.links.update(filter(None, (given.get("href"), given.get("src"))))


def broken_links(site: Path) -> list[str]:
    """Each broken link, behind the page that has it."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    if not pages:
        return [f"{site}: no page"]
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            places = pages[target].places if target in pages else {""}
            if not target.exists() or unquote(parts.fragment) not in places:
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
