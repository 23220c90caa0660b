"""MkDocs hook: files of the repository that pages link to become pages of the site, below `repository/`.

So the links of pages work in a clone and on the site alike. Markdown is rendered, other files are shown as code.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
FOLDER = "repository"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md")
NAME_OF_PAGE = re.compile(r"\[([\w/-]+\.md)\]\(([^)#\s]+)")
HOME = {"README.md": "index.md", "docs": "index.md"}


def repository(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def linked(page: Path, root: Path) -> set[str]:
    """Return the paths below the root of the files that a page links to."""
    targets = {(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if "://" not in link}
    return {str(path.relative_to(root)) for path in targets if path.exists() and path.is_relative_to(root)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each linked file outside of docs/, and for those that these link to."""
    root, added = repository(config), set[str]()
    todo = {*ALWAYS}.union(
        *(linked(Path(str(page.abs_src_path)), root) for page in files.documentation_pages())
    )
    while todo:
        name = todo.pop()
        path = root / name
        if name in added or name in HOME or name.startswith("docs/") or not path.is_file():
            continue
        added.add(name)
        if path.suffix == ".md":
            todo |= linked(path, root)
            files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(path)))
        else:
            code = f"# {name}\n\n```{path.suffix.removeprefix('.')}\n{path.read_text()}\n```\n"
            files.append(File.generated(config, f"{FOLDER}/{name}.md", content=code))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of a page at the pages that `on_files` added."""
    root, uri = repository(config), Path(page.file.src_uri)
    source = root / uri.relative_to(FOLDER) if uri.is_relative_to(FOLDER) else root / "docs" / uri

    def site_link(match: re.Match[str]) -> str:
        target = (source.parent / match[0]).resolve()
        if "://" in match[0] or not target.is_relative_to(root):
            return match[0]
        name = str(target.relative_to(root))
        if name in HOME:
            place = HOME[name]
        elif name.startswith("docs/"):
            place = name.removeprefix("docs/")
        elif target.suffix == ".md":
            place = f"{FOLDER}/{name}"
        else:
            place = f"{FOLDER}/{name}.md"
        return "../" * (len(uri.parts) - 1) + place

    def titled(match: re.Match[str]) -> str:
        """Replace the name of a page's file by the page's title."""
        target = files.get_file_from_path(str((Path("/") / uri.parent / match[2]).resolve().relative_to("/")))
        title = target and target.page and target.page.title
        return f"[{title or match[1].removesuffix('.md')}]({match[2]}"

    return LINK.sub(site_link, NAME_OF_PAGE.sub(titled, markdown))
