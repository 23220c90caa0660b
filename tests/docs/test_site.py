"""The documentation site: it builds without warnings, fetches nothing, and renders what the pages' Markdown means."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from .scripts import DOCS, ROOT

pytestmark = pytest.mark.slow
COUNTED = ("li", "table", "pre", "img")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly, so that a broken link or anchor is an error."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "links"], cwd=ROOT, check=True, capture_output=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Content(HTMLParser):
    """Tags of a page: what it fetches, its references within the site, its anchors, and counts in the article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.references: list[str] = []
        self.anchors: set[str | None] = set()
        self.counts = dict.fromkeys(COUNTED, 0)
        self._is_content = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self._is_content = self._is_content or tag == "article"
        reference = named.get("src") or named.get("href") or ""
        if tag in ("script", "link", "img"):
            self.fetched.append(reference)
        if reference and not re.match(r"[a-z]+:|//", reference):
            self.references.append(unquote(reference))
        self.anchors.add(named.get("id"))
        if self._is_content and tag in COUNTED:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._is_content = False


def pages(site: Path) -> Iterator[tuple[str, Content]]:
    for path in sorted(site.rglob("*.html")):
        yield str(path.relative_to(site)), Content(path.read_text())


def test_no_page_fetches_anything(site: Path) -> None:
    fetched = [(page, link) for page, content in pages(site) for link in content.fetched]
    assert [pair for pair in fetched if re.match(r"(https?:)?//", pair[1])] == []


def test_every_link_of_a_page_leads_to_a_file_and_an_anchor(site: Path) -> None:
    """Also those that `--strict` does not see: of docstrings, and of the theme."""
    contents = {page: content for page, content in pages(site) if page != "404.html"}  # served at any address
    broken = []
    for page, content in contents.items():
        for link in content.references:
            target, _, anchor = link.partition("#")
            path = ((site / page).parent / target).resolve() if target else site / page
            known = contents.get(str(path.relative_to(site))) if path.is_file() else None
            if not path.exists() or (anchor and known is not None and anchor not in known.anchors):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_every_page_has_the_lists_tables_and_pictures_of_its_markdown(site: Path) -> None:
    """Python-Markdown wants blank lines before lists where GitHub does not."""
    markdown = MarkdownIt("commonmark").enable("table")
    differing = []
    for source in sorted([*DOCS.glob("*.md"), *DOCS.glob("decisions/*.md")]):
        name = str(source.relative_to(DOCS)).replace("README.md", "index.md").replace(".md", ".html")
        expected = Content(f"<article>{markdown.render(source.read_text())}</article>").counts
        rendered = Content((site / name).read_text()).counts
        differing += [f"{name}: {tag}" for tag in COUNTED if rendered[tag] != expected[tag]]
    assert differing == []
