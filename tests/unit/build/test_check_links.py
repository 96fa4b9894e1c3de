"""The check of a built site finds links that lead nowhere."""

from __future__ import annotations

from pathlib import Path

from docs.check_links import broken_links


def test_links_to_missing_files_and_places_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a page.html").write_text('<h1 id="there">A</h1><a href="#there">up</a>')
    (tmp_path / "index.html").write_text(
        '<a href="sub/a%20page.html#there">1</a> <a href="sub/a%20page.html#away">2</a> '
        '<a href="gone.html">3</a> <img src="sub/a%20page.html"> <a href="https://away">4</a> '
        '<a href="#nowhere">5</a>'
    )
    assert broken_links(tmp_path) == [
        "index.html: #nowhere",
        "index.html: gone.html",
        "index.html: sub/a%20page.html#away",
    ]


def test_a_site_without_pages_is_no_site(tmp_path: Path) -> None:
    assert broken_links(tmp_path) == [f"{tmp_path}: no page"]
