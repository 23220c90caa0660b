"""Drawn timelines: every computation has its box, numbers fit, colours are distinct, files are valid."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from echelon.pipeline.action import Action, Op
from echelon.pipeline.schedules import SCHEDULES, build_schedule
from echelon.pipeline.simulate import Costs, Span, Timeline, simulate
from echelon.pipeline.timeline_drawing import (
    NAMES,
    WAITING,
    Panel,
    boxes,
    draw,
    rank_bubble,
    save_timelines,
    shade,
)

from ..slow import slow

SVG = "{http://www.w3.org/2000/svg}"
# (Linear) colours as seen without one kind of cone; Machado, Oliveira, Fernandes 2009, severity 1.
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def panel(style: str = "1f1b", num_ranks: int = 2, num_microbatches: int = 3, num_chunks: int = 1) -> Panel:
    schedule = build_schedule(style, num_ranks, num_microbatches, num_chunks)
    costs = Costs().per_chunk(SCHEDULES[style].chunks or num_chunks)
    return Panel(title=style, timeline=simulate(schedule, costs))


def drawn_boxes(figure: Figure) -> dict[str, Rectangle]:
    patches = (patch for axes in figure.axes for patch in axes.findobj(Rectangle))
    return {patch.get_gid(): patch for patch in patches if patch.get_gid()}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible()]


@pytest.mark.parametrize(
    ("style", "num_ranks", "num_microbatches", "num_chunks"),
    [
        *((style, 4, 8, 1) for style in SCHEDULES),
        ("interleaved", 4, 8, 2),
        *slow(("zbv", 16, 32, 1)),
    ],
)
def test_every_computation_has_a_box_where_it_ran_with_its_number_within(
    style: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> None:
    one = panel(style, num_ranks, num_microbatches, num_chunks)
    figure = draw([one], unit="s")
    renderer = FigureCanvasAgg(figure).get_renderer()
    patches = drawn_boxes(figure)
    assert len(patches) == sum(map(len, one.timeline.spans))
    numbers = {
        text.get_position(): text
        for text in figure.axes[0].texts
        if text.get_text().isdigit() and text.get_transform() == figure.axes[0].transData
    }
    for gid, rank, _, (action, start, end) in boxes(0, one.timeline):
        patch, text = patches[gid], numbers.pop(((start + end) / 2, rank))
        assert (patch.get_x(), patch.get_x() + patch.get_width()) == pytest.approx((start, end))
        assert patch.get_y() + patch.get_height() / 2 == pytest.approx(rank)
        assert text.get_text() == str(action.microbatch)
        extent, room = text.get_window_extent(renderer), patch.get_window_extent(renderer)
        assert room.x0 <= extent.x0 and extent.x1 <= room.x1 and room.y0 <= extent.y0 and extent.y1 <= room.y1
    assert numbers == {}


def test_numbers_of_boxes_that_are_too_narrow_are_left_out() -> None:
    lengths = (50, 0.1, 50)
    starts = (0, 50, 60)
    spans = [
        Span(Action(Op.FORWARD, 0, microbatch), start, start + length)
        for microbatch, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    figure = draw([Panel(title="", timeline=Timeline(spans=[spans], peak_activations=[7]))], unit="s")
    numbers = [
        text.get_text() for text in figure.axes[0].texts if text.get_transform() == figure.axes[0].transData
    ]
    assert numbers == ["0", "2"]


def test_title_rows_axis_and_legend_say_what_is_drawn() -> None:
    shown = texts(draw([panel("zbv", num_ranks=4, num_microbatches=8)], unit="fortnights"))
    assert "zbv: bubble 6.2% of the work" in shown and "time (fortnights)" in shown
    for label in ("forward", "input gradient", "weight gradient", "waiting", "chunks 0, 1 of a rank"):
        assert shown.count(label) == 1
    assert "backward" not in shown  # all backwards were split
    assert "rank 0 (stages 0, 7)" in shown
    shown = texts(draw([panel("gpipe", num_ranks=3, num_microbatches=16)], unit="s"))
    assert "stage 0" in shown and shown.count("bubble 12.5%, peak 16") == 3
    spans = [[Span(Action(Op.FORWARD, 0, 0), 0, 4)], [Span(Action(Op.FORWARD, 1, 0), 4, 5)], []]
    made = Timeline(spans=spans, peak_activations=[1, 1, 0])
    assert [rank_bubble(made, rank) for rank in range(3)] == [0.25, 4.0, 0.0]


def test_panels_share_one_time_axis() -> None:
    upper, lower = panel("gpipe", num_microbatches=9), panel("1f1b", num_microbatches=3)
    axes = draw([upper, lower], unit="s").axes
    assert [one.get_xlim() for one in axes] == [(0, upper.timeline.end)] * 2
    assert axes[0].get_position().y0 > axes[1].get_position().y1


@pytest.mark.parametrize("vision", VISION)
def test_colours_and_their_shades_are_distinct(vision: str) -> None:
    pairs = itertools.combinations([WAITING, *(shade(op, chunk, 2) for op in NAMES for chunk in (0, 1))], 2)
    distances = [np.linalg.norm(lab(one, vision) - lab(other, vision)) for one, other in pairs]
    assert min(distances) > 10  # 2 is just visible side by side


def lab(colour: tuple[float, float, float], vision: str) -> np.ndarray:
    """Convert an sRGB colour to CIELAB, as it is seen."""
    coded = np.array(colour)
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(VISION[vision] @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_an_svg_describes_the_box_at_the_pointer_and_keeps_text_as_text(tmp_path: Path) -> None:
    one = panel("zbv", num_ranks=2, num_microbatches=3)
    save_timelines([one], tmp_path / "a.svg", unit="ms")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    groups = {group.get("id"): group for group in root.iter(f"{SVG}g")}
    for box in boxes(0, one.timeline):
        assert groups[box.gid].find(f"{SVG}title") is not None
    first = groups["box-0-0-0"].findtext(f"{SVG}title")
    assert first == "forward of microbatch 0\nstage 0, rank 0\n0 to 0.5: 0.5 ms"
    assert "rank 1 (stages 1, 2)" in [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("suffix", [".svg", ".pdf", *slow(".PNG")])
def test_equal_timelines_give_equal_files(tmp_path: Path, suffix: str) -> None:
    written = []
    for name in ("a", "b"):
        save_timelines([panel()], (tmp_path / name).with_suffix(suffix), unit="ms")
        written.append((tmp_path / name).with_suffix(suffix).read_bytes())
    assert written[0] == written[1]
    if suffix == ".pdf":  # text is kept as text
        assert b"/FontFile2" in written[0] and b"/Type3" not in written[0]
    if suffix == ".PNG":
        inches = draw([panel()], unit="ms").get_size_inches()
        assert int.from_bytes(written[0][16:20], "big") == pytest.approx(200 * inches[0], abs=1)
