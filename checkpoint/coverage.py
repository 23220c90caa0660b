"""Whether boxes cover a whole tensor, each entry once."""

from collections.abc import Iterator, Sequence

from .box import Box


def coverage_faults(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """What is wrong with the boxes of a tensor of this shape; nothing where they cover every entry exactly once."""
    whole = Box.whole(shape)
    faults = [f"{_shown(box)} reaches out of it" for box in boxes if box.numel and box.common(whole) != box]
    faults += [f"{_shown(a)} and {_shown(b)} overlap" for a, b in _overlaps(boxes)]
    covered = sum(box.numel for box in boxes)
    if not faults and covered != whole.numel:
        faults.append(f"{whole.numel - covered} of its {whole.numel} entries are nowhere")
    return faults


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs with something in common; each box meets only those that end behind its begin along the first dimension."""
    open_boxes: list[Box] = []
    for box in sorted(box for box in boxes if box.numel):
        begin = box.offset[:1]
        open_boxes = [other for other in open_boxes if not begin or other.ends()[:1] > begin]
        yield from ((other, box) for other in open_boxes if other.common(box) is not None)
        open_boxes.append(box)


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{start}:{end}' for start, end in zip(box.offset, box.ends(), strict=True))}]"
