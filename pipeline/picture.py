"""Files of drawn timelines: .png, .pdf, .svg, and .html that is one page by itself. The figure is draw.py."""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from .draw import NAMES, Box, Panel, boxes, draw, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".pdf", ".png", ".svg")
DOTS_PER_INCH = 200  # of a .png
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
# Text stays text: searchable, and set in the font of the page that a picture is put on.
_SETTINGS: dict[str, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "echelon"}
_STYLE = "text{pointer-events:none} [id^='box-']:hover path{stroke:#000!important;stroke-width:1.2!important}"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body{{margin:1em;overflow-x:auto;background:#fff}}</style>
{svg}
</html>
"""


def save_timelines(panels: Sequence[Panel], path: Path, *, unit: str) -> None:
    """Draw timelines to a file, of the kind that its suffix says; see `draw`.

    In .svg and .html, pointing at a box shows what it is and when it ran. Equal timelines give equal files.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the suffix is none of SUFFIXES.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ValueError(
            f"a timeline cannot be drawn to {str(path)!r}: end it in one of {', '.join(SUFFIXES)}"
        )
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        figure = draw(panels, unit=unit)
        if kind == ".png":
            figure.savefig(path, dpi=DOTS_PER_INCH)
        elif kind == ".pdf":
            figure.savefig(path, metadata={"CreationDate": None})
        else:
            svg = _with_details(_svg(figure), _details(panels, unit=unit))
            title = html.escape("; ".join(panel.title for panel in panels))
            path.write_text(svg if kind == ".svg" else _PAGE.format(title=title, svg=svg), encoding="utf-8")


def _svg(figure: "Figure") -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _details(panels: Sequence[Panel], *, unit: str) -> dict[str, str]:
    """What is shown of each box, by its id."""
    return {
        box.gid: _told(box, unit=unit)
        for index, panel in enumerate(panels)
        for box in boxes(index, panel.timeline)
    }


def _told(box: Box, *, unit: str) -> str:
    action, start, end = box.span
    return (
        f"{NAMES[action.op]} of microbatch {action.microbatch}\n"
        f"stage {action.stage}, rank {box.rank}\n"
        f"{start:.6g} to {end:.6g}: {end - start:.4g} {unit}"
    )


def _with_details(svg: str, details: dict[str, str]) -> str:
    """An SVG whose groups of these ids have a title, which browsers show at the pointer."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    style = ElementTree.Element(f"{{{_SVG}}}style")
    style.text = _STYLE
    root.insert(0, style)
    for group in root.iter(f"{{{_SVG}}}g"):
        if group.get("id") in details:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = details[group.get("id", "")]
            group.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")
