"""Timelines as pictures: .png, .pdf, .svg, and .html that is one page by itself. Needs matplotlib."""

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from .action import Op
from .simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RGB = tuple[float, float, float]

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

NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
}
# Chosen so that they and their paler shades also stay apart in the three kinds of colour blindness; a test measures it.
_COLOURS: dict[Op, RGB] = {
    Op.FORWARD: (0.12, 0.30, 0.72),
    Op.BACKWARD: (0.86, 0.33, 0.12),
    Op.BACKWARD_INPUT: (0.92, 0.73, 0.29),
    Op.BACKWARD_WEIGHT: (0.57, 0.28, 0.60),
}
WAITING: RGB = (0.92, 0.92, 0.92)
_INK: RGB = (0.1, 0.1, 0.1)
_FAINT: RGB = (0.4, 0.4, 0.4)
_PALEST = 0.42  # how near to white a rank's last chunk is

# Lengths are in points, 72 to an inch. Those from _ROW on grow with the figure, so that letters stay legible where a
# wide one is scaled down to a page.
_MIN_WIDTH, _MAX_WIDTH = 430.0, 2200.0  # of the time axis
_MAX_GROWTH = 2.0
_MIN_NUMBER, _GOOD_NUMBER, _MAX_NUMBER = 4.5, 5.5, 8.0  # sizes of the numbers in boxes
_NUMBER_MARGIN = 1.5
_ROW = 18.0
_GAP = 0.1  # of a row, between boxes of neighbours
_COLUMN = 48.0  # of the figures beside a rank
_TITLE, _AXIS, _LEGEND, _EDGE = 30.0, 30.0, 20.0, 8.0
_TEXT, _SMALL = 8.5, 7.0
_LETTER, _DIGIT = 0.56, 0.64  # how wide letters are on average, as a share of their size


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A timeline to draw.

    Args:
        title: stands above it, and the bubble after it.
        timeline: of every rank; one of them at least does something.
    """

    title: str
    timeline: Timeline


class Box(NamedTuple):
    """A span where it is drawn. `gid` is its id in an SVG, `chunk` counts the stages of its rank."""

    gid: str
    rank: int
    chunk: int
    span: Span


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Sizes that follow from what is drawn, in points."""

    panels: Sequence[Panel]

    @cached_property
    def end(self) -> float:
        """Of the time axis, which all panels share."""
        return max(panel.timeline.end for panel in self.panels)

    @cached_property
    def width(self) -> float:
        """Of the time axis: wide enough for numbers in the narrowest kind of box, within bounds."""
        wanted = self.end / self._narrowest * (self.number_width(_GOOD_NUMBER) + _NUMBER_MARGIN)
        return min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)

    @cached_property
    def growth(self) -> float:
        """By how much letters are larger than on the narrowest figure."""
        return min((self.width / _MIN_WIDTH) ** 0.5, _MAX_GROWTH)

    @cached_property
    def number(self) -> float:
        """The size of the numbers in boxes, one for the whole figure."""
        room = self._narrowest / self.end * self.width - _NUMBER_MARGIN
        return min(max(room / self.number_width(1.0), _MIN_NUMBER), _MAX_NUMBER)

    def number_width(self, size: float) -> float:
        """Of the longest number."""
        return _DIGIT * size * len(str(max(span.action.microbatch for span in self._spans)))

    @cached_property
    def label_width(self) -> float:
        """Of what stands before the rows."""
        labels = [label for panel in self.panels for label in row_labels(panel.timeline)]
        return self.growth * (_EDGE + 4 + _TEXT * _LETTER * max(map(len, labels)))

    @cached_property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure."""
        width = self.label_width + self.width + self.growth * (2 * _COLUMN + _EDGE)
        return width, sum(map(self.height, self.panels)) + self.growth * (_AXIS + _LEGEND)

    def height(self, panel: Panel) -> float:
        """Of a panel with its title."""
        return self.growth * _TITLE + self.rows(panel)

    def rows(self, panel: Panel) -> float:
        """The height of a panel's rows together."""
        return self.growth * _ROW * len(panel.timeline.spans)

    @cached_property
    def _spans(self) -> list[Span]:
        return [span for panel in self.panels for spans in panel.timeline.spans for span in spans]

    @cached_property
    def _narrowest(self) -> float:
        lengths: dict[Op, list[float]] = {}
        for span in self._spans:
            lengths.setdefault(span.action.op, []).append(span.end - span.start)
        return min(map(median, lengths.values()))


def save_timelines(panels: Sequence[Panel], path: Path, *, unit: str) -> None:
    """Draw timelines to a file, in the format of its suffix; see `draw`.

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
    """Descriptions of all boxes, by their ids."""
    return {
        box.gid: _detail(box, unit=unit)
        for index, panel in enumerate(panels)
        for box in boxes(index, panel.timeline)
    }


def _detail(box: Box, *, unit: str) -> str:
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


def draw(panels: Sequence[Panel], *, unit: str) -> "Figure":
    """Draw timelines below each other over one time axis.

    A row is a rank, a box a computation with the number of its microbatch; a number that a box is too narrow for
    is left out. A rank's chunks differ by lightness. Beside each rank stand its bubble (idle time over its own
    work) and its peak of activations, in microbatches through all of the rank's stages.

    Args:
        panels: from the top.
        unit: of time, for the axis.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    layout = _Layout(panels=panels)
    width, height = layout.size
    figure = Figure(figsize=(width / 72, height / 72))
    top = height
    for index, panel in enumerate(panels):
        top -= layout.height(panel)
        axes = figure.add_axes(
            (
                layout.label_width / width,
                top / height,
                layout.width / width,
                layout.rows(panel) / height,
            )
        )
        _set_axes(axes, panel, layout, unit=unit if index == len(panels) - 1 else None)
        _draw_boxes(axes, index, panel.timeline, layout)
        _write_margins(axes, panel, layout)
    _draw_legend(figure, panels, size=layout.growth * _TEXT)
    return figure


def require_matplotlib() -> None:
    """Raise ImportError where matplotlib is missing, saying how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib, which is not installed: pip install 'echelon[plot]'"
        ) from error


def boxes(panel: int, timeline: Timeline) -> Iterator[Box]:
    """All boxes of a panel, which is given by its number from the top."""
    for rank, spans in enumerate(timeline.spans):
        stages = stages_of(spans)
        for index, span in enumerate(spans):
            chunk = stages.index(span.action.stage)
            yield Box(f"box-{panel}-{rank}-{index}", rank, chunk, span)


def stages_of(spans: Sequence[Span]) -> list[int]:
    """The stages that a rank computes, in the order of the pipeline."""
    return sorted({span.action.stage for span in spans})


def row_labels(timeline: Timeline) -> list[str]:
    """Labels of the rows: the stage, or the rank and its stages."""
    by_rank = [stages_of(spans) for spans in timeline.spans]
    if all(len(stages) == 1 for stages in by_rank):
        return [f"stage {stages[0]}" for stages in by_rank]
    return [f"rank {rank} (stages {', '.join(map(str, stages))})" for rank, stages in enumerate(by_rank)]


def rank_bubble(timeline: Timeline, rank: int) -> float:
    """Idle time of a rank over its work."""
    idle = timeline.idle(rank)
    return idle / (timeline.end - idle) if idle < timeline.end else 0.0


def shade(op: Op, chunk: int, num_chunks: int) -> RGB:
    """The colour of a computation: paler, the later its chunk."""
    return _paler(_COLOURS[op], chunk, num_chunks)


def _paler(colour: RGB, chunk: int, num_chunks: int) -> RGB:
    white = _PALEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in colour)
    return red, green, blue


def _ink_on(colour: RGB) -> RGB:
    red, green, blue = colour
    return (1.0, 1.0, 1.0) if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else _INK


def _num_chunks(timeline: Timeline) -> int:
    return max(len(stages_of(spans)) for spans in timeline.spans)


def _set_axes(axes: "Axes", panel: Panel, layout: _Layout, *, unit: str | None) -> None:
    """Bounds, rows and their labels, and the time axis, which is written on the last panel alone."""
    num_ranks, growth = len(panel.timeline.spans), layout.growth
    axes.set_xlim(0, layout.end)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_yticks(range(num_ranks), row_labels(panel.timeline))
    axes.tick_params(axis="y", length=0, pad=4 * growth, labelsize=_TEXT * growth)
    axes.tick_params(
        axis="x",
        labelbottom=unit is not None,
        labelsize=_TEXT * growth,
        width=0.6 * growth,
        length=3 * growth,
    )
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_linewidth(0.6 * growth)
    if unit is not None:
        axes.set_xlabel(f"time ({unit})", fontsize=_TEXT * growth, labelpad=2 * growth)


def _draw_boxes(axes: "Axes", index: int, timeline: Timeline, layout: _Layout) -> None:
    from matplotlib.patches import Rectangle

    height = 1 - _GAP
    num_chunks = _num_chunks(timeline)
    for rank in range(len(timeline.spans)):
        axes.add_artist(
            Rectangle((0, rank - height / 2), timeline.end, height, facecolor=WAITING, linewidth=0)
        )
    for gid, rank, chunk, (action, start, end) in boxes(index, timeline):
        length = (end - start) / layout.end * layout.width
        colour = shade(action.op, chunk, num_chunks)
        axes.add_artist(
            Rectangle(
                (start, rank - height / 2),
                end - start,
                height,
                facecolor=colour,
                edgecolor="white",
                linewidth=min(0.5, length / 10),
                gid=gid,
            )
        )
        number = str(action.microbatch)
        if length >= layout.number_width(layout.number):
            axes.text(
                (start + end) / 2,
                rank,
                number,
                fontsize=layout.number,
                color=_ink_on(colour),
                ha="center",
                va="center_baseline",
            )


def _write_margins(axes: "Axes", panel: Panel, layout: _Layout) -> None:
    """The title above, and beside each rank its figures."""
    timeline, growth = panel.timeline, layout.growth
    title = f"{panel.title}: bubble {timeline.bubble:.1%} of the work"
    _write_above(axes, title, 0, 7 * growth, size=growth * (_TEXT + 1), weight="bold")
    columns = {
        "bubble": [f"{rank_bubble(timeline, rank):.1%}" for rank in range(len(timeline.spans))],
        "peak\nactivations": [f"{peak:.3g}" for peak in timeline.peak_shares],
    }
    for number, (heading, figures) in enumerate(columns.items(), start=1):
        right = 1 + growth * number * _COLUMN / layout.width
        _write_above(axes, heading, right, 3 * growth, size=growth * _SMALL, color=_FAINT, ha="right")
        for rank, text in enumerate(figures):
            axes.text(
                right,
                rank,
                text,
                transform=axes.get_yaxis_transform(),
                fontsize=growth * (_SMALL + 0.5),
                color=_INK,
                ha="right",
                va="center_baseline",
            )


def _write_above(axes: "Axes", text: str, x: float, above: float, *, size: float, **style: Any) -> None:
    """Write at a share x of the width, so many points above the first row."""
    axes.annotate(
        text,
        (x, 1),
        xycoords="axes fraction",
        xytext=(0, above),
        textcoords="offset points",
        fontsize=size,
        **style,
    )


def _draw_legend(figure: "Figure", panels: Sequence[Panel], *, size: float) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    num_chunks = max(_num_chunks(panel.timeline) for panel in panels)
    used = {span.action.op for panel in panels for spans in panel.timeline.spans for span in spans}
    chunks = range(num_chunks)
    entries = {
        name: tuple(Patch(facecolor=shade(op, chunk, num_chunks)) for chunk in chunks)
        for op, name in NAMES.items()
        if op in used
    }
    entries["waiting"] = (Patch(facecolor=WAITING),)
    if num_chunks > 1:
        grey = [Patch(facecolor=_paler(_FAINT, chunk, num_chunks)) for chunk in chunks]
        entries[f"chunks {', '.join(map(str, chunks))} of a rank"] = tuple(grey)
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="lower center",
        ncols=len(entries),
        frameon=False,
        fontsize=size,
        handlelength=1.0 + 0.6 * (num_chunks - 1),
        handleheight=1.0,
        handletextpad=0.5,
        columnspacing=1.6,
        borderaxespad=0.4,
    )
