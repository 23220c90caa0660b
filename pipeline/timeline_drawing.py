"""Draw timelines as .png, .pdf or .svg. Needs matplotlib."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

SUFFIXES = (".pdf", ".png", ".svg")
DOTS_PER_INCH = 200  # of a .png
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
# Text is not drawn as paths: it is searchable, and takes the font of the page that shows the picture.
_SETTINGS: dict[str, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "echelon"}
_STYLE = "text{pointer-events:none} [id^='box-']:hover path{stroke:#000!important;stroke-width:1.2!important}"
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
}
# These colours and their paler shades are distinguishable in the three kinds of colour blindness; a test measures it.
_COLOURS: dict[Op, RGB] = {
    Op.FORWARD: (0.12, 0.30, 0.72),
    Op.BACKWARD: (0.86, 0.33, 0.12),
    Op.BACKWARD_INPUT: (0.92, 0.73, 0.29),
    Op.BACKWARD_WEIGHT: (0.57, 0.28, 0.60),
}
WAITING: RGB = (0.92, 0.92, 0.92)
_INK: RGB = (0.1, 0.1, 0.1)
_FAINT: RGB = (0.4, 0.4, 0.4)
_PALEST = 0.42  # share of white in the colour of a rank's last chunk

# Lengths in points, 72 to an inch. They grow with the figure, so that text stays legible when a wide figure is scaled
# down to a page.
_MIN_WIDTH, _MAX_WIDTH, _MAX_SCALE = 430.0, 2200.0, 2.0  # of the time axis
_MARGINS = 150.0  # beside it
_ROW, _TITLE, _AXIS_AND_LEGEND = 18.0, 26.0, 50.0
_TEXT = 8.5
_MIN_NUMBER, _GOOD_NUMBER, _MAX_NUMBER = 4.5, 5.5, 8.0  # sizes of the numbers in boxes, on any figure
_DIGIT = 0.64  # width of a digit, divided by its size
_NUMBER_MARGIN = 1.5
_GAP = 0.1  # of a row, between boxes of neighbours


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A timeline to draw.

    Args:
        title: the text above the timeline, followed by the bubble.
        timeline: the spans of every rank; at least one rank has some.
    """

    title: str
    timeline: Timeline


class PlacedSpan(NamedTuple):
    """A span and its place in the drawing. `gid` is its id in an SVG, `chunk` counts the stages of its rank."""

    gid: str
    rank: int
    chunk: int
    span: Span


def save_timelines(panels: Sequence[Panel], path: Path, *, unit: str) -> None:
    """Draw timelines to a file, in the format of its suffix; see `draw`.

    In an .svg, a tooltip shows the computation of a box and its times. Equal timelines give equal files.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the suffix is not one of SUFFIXES.
        OSError: the file cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ValueError(
            f"a timeline cannot be drawn to {str(path)!r}: end it in one of {', '.join(SUFFIXES)} (a browser opens "
            "an .svg)"
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
            written = io.StringIO()
            figure.savefig(written, format="svg", metadata={"Date": None})
            path.write_text(_with_tooltips(written.getvalue(), panels, unit=unit), encoding="utf-8")


def _with_tooltips(svg: str, panels: Sequence[Panel], *, unit: str) -> str:
    """Return an SVG with a title in every box, which browsers show as a tooltip, and a style that marks the box.

    Args:
        svg: the drawing of `panels`, with the ids of `boxes`.
        panels: from the top.
        unit: of time.
    """
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    style = ElementTree.Element(f"{{{_SVG}}}style")
    style.text = _STYLE
    root.insert(0, style)
    groups = {group.get("id"): group for group in root.iter(f"{{{_SVG}}}g")}
    for index, panel in enumerate(panels):
        for gid, rank, _, (action, start, end) in boxes(index, panel.timeline):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = (
                f"{NAMES[action.op]} of microbatch {action.microbatch}\n"
                f"stage {action.stage}, rank {rank}\n"
                f"{start:.6g} to {end:.6g}: {end - start:.4g} {unit}"
            )
            groups[gid].insert(0, title)
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

    end = max(panel.timeline.end for panel in panels)
    rows = [len(panel.timeline.spans) for panel in panels]
    shortest, digits = _shortest_box(panels)
    legible_width = end / shortest * (digits * _DIGIT * _GOOD_NUMBER + _NUMBER_MARGIN)
    width = min(max(legible_width, _MIN_WIDTH), _MAX_WIDTH)
    scale = min((width / _MIN_WIDTH) ** 0.5, _MAX_SCALE)
    height = scale * (_ROW * sum(rows) + _TITLE * len(rows) + _AXIS_AND_LEGEND)
    figure = Figure(figsize=((width + scale * _MARGINS) / 72, height / 72), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for index, (axes, panel) in enumerate(zip(all_axes, panels, strict=True)):
        _draw_boxes(axes, index, panel.timeline)
        _write_labels(axes, panel, scale)
    axes.set_xlim(0, end)
    axes.set_xlabel(f"time ({unit})", fontsize=scale * _TEXT)
    _draw_legend(figure, panels, size=scale * _TEXT)
    figure.draw_without_rendering()  # lays the figure out, on which the size of the numbers depends
    figure.set_layout_engine("none")
    points_per_time = axes.get_window_extent().width * 72 / figure.dpi / end
    size = (shortest * points_per_time - _NUMBER_MARGIN) / (digits * _DIGIT)
    size = min(max(size, _MIN_NUMBER), _MAX_NUMBER)
    for axes, panel in zip(all_axes, panels, strict=True):
        _write_numbers(axes, panel.timeline, size=size, shortest=digits * _DIGIT * size / points_per_time)
    return figure


def _shortest_box(panels: Sequence[Panel]) -> tuple[float, int]:
    """Return the width of a short box and the digits of its number, from which the size of the numbers follows.

    Returns:
        The median duration of the op whose computations are the shortest, in units of time; and the number of digits of
        the highest microbatch index.
    """
    durations: dict[Op, list[float]] = {}
    last_microbatch = 0
    for action, start, end in (span for panel in panels for spans in panel.timeline.spans for span in spans):
        durations.setdefault(action.op, []).append(end - start)
        last_microbatch = max(last_microbatch, action.microbatch)
    return min(map(median, durations.values())), len(str(last_microbatch))


def require_matplotlib() -> None:
    """Raise ImportError if matplotlib is missing, with the command that installs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib, which is not installed: pip install 'echelon[plot]'"
        ) from error


def boxes(panel: int, timeline: Timeline) -> Iterator[PlacedSpan]:
    """Yield all boxes of a panel, given by its number from the top."""
    for rank, spans in enumerate(timeline.spans):
        stages = stages_of(spans)
        for index, span in enumerate(spans):
            chunk = stages.index(span.action.stage)
            yield PlacedSpan(f"box-{panel}-{rank}-{index}", rank, chunk, span)


def stages_of(spans: Sequence[Span]) -> list[int]:
    """Return the stages that a rank computes, in the order of the pipeline."""
    return sorted({span.action.stage for span in spans})


def row_labels(timeline: Timeline) -> list[str]:
    """Return the labels of the rows: the stage, or the rank and its stages."""
    by_rank = [stages_of(spans) for spans in timeline.spans]
    if all(len(stages) == 1 for stages in by_rank):
        return [f"stage {stages[0]}" for stages in by_rank]
    return [f"rank {rank} (stages {', '.join(map(str, stages))})" for rank, stages in enumerate(by_rank)]


def rank_bubble(timeline: Timeline, rank: int) -> float:
    """Return the idle time of a rank divided by its work."""
    idle = timeline.idle(rank)
    return idle / (timeline.end - idle) if idle < timeline.end else 0.0


def shade(op: Op, chunk: int, num_chunks: int) -> RGB:
    """Return the colour of a computation: later chunks are paler."""
    return _paler(_COLOURS[op], chunk, num_chunks)


def _paler(colour: RGB, chunk: int, num_chunks: int) -> RGB:
    white = _PALEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = (channel + (1 - channel) * white for channel in colour)
    return red, green, blue


def _num_chunks(timeline: Timeline) -> int:
    return max(len(stages_of(spans)) for spans in timeline.spans)


def _draw_boxes(axes: "Axes", index: int, timeline: Timeline) -> None:
    """Draw a row for every rank in the colour of waiting, and in it a box for every computation.

    Args:
        axes: of the panel; its y axis counts ranks from the top.
        index: the panel's number from the top, for the ids of boxes.
        timeline: the computations.
    """
    from matplotlib.patches import Rectangle

    height = 1 - _GAP
    for rank in range(len(timeline.spans)):
        axes.add_artist(
            Rectangle((0, rank - height / 2), timeline.end, height, facecolor=WAITING, linewidth=0)
        )
    num_chunks = _num_chunks(timeline)
    for gid, rank, chunk, (action, start, end) in boxes(index, timeline):
        box = Rectangle((start, rank - height / 2), end - start, height, gid=gid)
        box.set(facecolor=shade(action.op, chunk, num_chunks), edgecolor="white", linewidth=0.3)
        axes.add_artist(box)
    axes.set_ylim(len(timeline.spans) - 0.5, -0.5)


def _write_numbers(axes: "Axes", timeline: Timeline, *, size: float, shortest: float) -> None:
    """Write the number of the microbatch into every box that is at least `shortest` units of time long."""
    num_chunks = _num_chunks(timeline)
    for _, rank, chunk, (action, start, end) in boxes(0, timeline):
        if end - start >= shortest:
            red, green, blue = shade(action.op, chunk, num_chunks)
            is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
            axes.text(
                (start + end) / 2,
                rank,
                str(action.microbatch),
                fontsize=size,
                color="white" if is_dark else _INK,
                ha="center",
                va="center_baseline",
            )


def _write_labels(axes: "Axes", panel: Panel, scale: float) -> None:
    """Write the title above the axes, each row's label at its left, its bubble and peak at its right."""
    timeline, rows = panel.timeline, range(len(panel.timeline.spans))
    title = f"{panel.title}: bubble {timeline.bubble:.1%} of the work"
    axes.set_title(title, loc="left", fontsize=scale * (_TEXT + 1), weight="bold")
    axes.set_yticks(rows, row_labels(timeline))
    right = axes.secondary_yaxis("right")
    peaks = timeline.peak_shares
    right.set_yticks(
        rows, [f"bubble {rank_bubble(timeline, rank):.1%}, peak {peaks[rank]:.3g}" for rank in rows]
    )
    for side in (axes, right):
        side.tick_params(axis="y", length=0, labelsize=scale * _TEXT)
        side.spines[:].set_visible(False)
    axes.spines["bottom"].set_visible(True)
    axes.tick_params(axis="x", labelsize=scale * _TEXT)


def _draw_legend(figure: "Figure", panels: Sequence[Panel], *, size: float) -> None:
    """Explain the colours of the computations, of waiting, and the shades of a rank's chunks below the panels."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    chunks = range(max(_num_chunks(panel.timeline) for panel in panels))
    ops = {span.action.op for panel in panels for spans in panel.timeline.spans for span in spans}
    entries = {
        name: tuple(Patch(facecolor=shade(op, chunk, len(chunks))) for chunk in chunks)
        for op, name in NAMES.items()
        if op in ops
    }
    entries["waiting"] = (Patch(facecolor=WAITING),)
    if len(chunks) > 1:
        grey = tuple(Patch(facecolor=_paler(_FAINT, chunk, len(chunks))) for chunk in chunks)
        entries[f"chunks {', '.join(map(str, chunks))} of a rank"] = grey
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="outside lower center",
        ncols=len(entries),
        frameon=False,
        fontsize=size,
        handlelength=1.0 + 0.6 * (len(chunks) - 1),
        handleheight=1.0,
    )
