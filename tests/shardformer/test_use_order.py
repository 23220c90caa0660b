"""Foretelling what is used next, from what was."""

from echelon.shardformer.layers.use_order import Use, UseOrder


def follow(order: UseOrder[str], uses: str) -> list[str | None]:
    """Note uses in order (an upper-case letter is one in a backward) and say what is foretold after each."""
    foretold = []
    for each in uses:
        use = Use("backward" if each.isupper() else "forward", each.lower())
        order.note(use, in_backward=each.isupper())
        after = order.after(use)
        foretold.append(None if after is None else after.thing)
    return foretold


def test_a_second_pass_is_foretold_but_not_its_end() -> None:
    order: UseOrder[str] = UseOrder()
    assert follow(order, "abcCBA") == [None] * 6
    for _ in range(2):
        assert follow(order, "abcCBA") == ["b", "c", None, "b", "a", None]


def test_several_forwards_before_a_backward_are_passes_of_their_own() -> None:
    order: UseOrder[str] = UseOrder()
    follow(order, "ababBA")
    assert follow(order, "ababBABA") == ["b", None, "b", None, "a", None, "a", None]


def test_what_was_foretold_wrongly_once_is_not_again() -> None:
    order: UseOrder[str] = UseOrder()
    follow(order, "abcCBA")
    assert follow(order, "acCA") == ["b", None, "b", None]
    assert follow(order, "abcCBA") == [None, "c", None, None, "a", None]


def test_what_is_computed_again_belongs_to_the_backward() -> None:
    order: UseOrder[str] = UseOrder()
    again, backward = Use("again", "a"), Use("backward", "a")
    for _ in range(2):
        order.note(Use("forward", "a"), in_backward=False)
        order.note(again, in_backward=True)
        order.note(backward, in_backward=True)
    assert order.after(Use("forward", "a")) is None
    assert order.after(again) == backward
