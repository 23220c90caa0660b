"""The page of errors quotes messages that the code has."""

import ast
import re
from functools import cache

from .scripts import DOCS, ROOT

PAGE = DOCS / "troubleshooting.md"
PACKAGES = [path.parent for path in ROOT.glob("*/__init__.py")]


def text_of(text: ast.JoinedStr) -> str:
    """Return an f-string with "…" in the place of its values."""
    return "".join(str(node.value) if isinstance(node, ast.Constant) else "…" for node in text.values)


@cache
def texts() -> str:
    """Return all texts of the package's code, one a line; templates and f-strings have "…" for their values."""
    paths = [path for package in PACKAGES for path in package.rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    messages = [text_of(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    messages += [
        re.sub(r"\{\w+\}|%s", "…", node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(text.replace("\n", " ") for text in messages)


def quoted() -> list[str]:
    """Return the messages in the first column of the page's tables."""
    return re.findall(r"^\| `([^`]+)`", PAGE.read_text(), flags=re.M)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    assert len(quoted()) >= 60
    patterns = {message: "[^\n]*".join(map(re.escape, message.split("…"))) for message in quoted()}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, texts())] == []


def test_a_message_is_quoted_once() -> None:
    assert len(set(quoted())) == len(quoted())
