"""A count of which each rank holds a part, for code that reads it in two ways."""


class HeldCount(int):
    """How many of something this rank holds; dividing by it divides by how many there are in all.

    For attention that takes the heads of its split projections from `num_heads`, and the width of a head from
    whole inputs: `inputs.shape[-1] // num_heads`.

    Args:
        held: how many this rank holds.
        whole: how many all ranks hold together.
    """

    whole: int

    def __new__(cls, held: int, whole: int) -> "HeldCount":
        count = super().__new__(cls, held)
        count.whole = whole
        return count

    def __rfloordiv__(self, width: int) -> int:
        return width // self.whole

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # for copies and pickles
        return int(self), self.whole
