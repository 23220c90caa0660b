"""The benchmark of long sequences: that it runs, that live bytes are those, and that lengths are found."""

import json
import re
from pathlib import Path

import pytest
import torch

# Of the import of torch.distributed.tensor.parallel's peers, see test_zero.py.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

CONTENDERS = ["echelon ring_attn", "torch context parallel"]


@pytest.mark.slow
def test_every_length_is_measured_on_every_number_of_ranks(run_quickly, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path, picture = tmp_path / "sequence.json", tmp_path / "sequence.png"
    options = [
        "--ranks",
        "1",
        "2",
        "4",
        "--contenders",
        *CONTENDERS,
        "--json",
        str(path),
        "--plot",
        str(picture),
    ]
    printed = run_quickly("sequence.py", *options)

    number = r"\d+\.\d{3}"
    last = printed.splitlines()[-1]
    assert re.fullmatch(f"ratio_to_best_peer={number} bytes_to_best_peer={number}", last)
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(path.read_text())
    rows = found["runs"]["2"]["lengths"]
    assert [row["length"] for row in rows] == [4, 8, 16]  # 2 is no multiple of 2·ranks
    for row in rows:
        assert list(row["seconds"]) == list(row["bytes"]) == list(row["agreement"]) == CONTENDERS
        assert all(0 < each["kept"] <= each["peak"] for each in row["bytes"].values())
    assert found["longest"]["measured"]["1"] == 16
    assert found["longest"]["measured"]["2"] > 16
    assert set(found["longest"]["needs"]) == {"at most", "before the layers"}
    assert list(found["longest"]["longest"]) == ["1", "2", "4", "8", "16", "32", "64"]


def test_live_bytes_are_of_what_was_made_and_is_still_there(load) -> None:  # type: ignore[no-untyped-def]
    live_bytes = load("live_bytes")
    before = torch.ones(1000)
    with live_bytes.LiveBytes() as live:
        view = before.view(10, 100)
        assert live.now == 0
        made = view * 2
        turned = made.t()
        del made
        assert live.now == 4000  # the view keeps it
        del turned
        assert (live.now, live.peak, live.kept) == (0, 4000, None)


def test_bytes_kept_are_those_at_the_first_backward(load) -> None:  # type: ignore[no-untyped-def]
    training_bytes = load("live_bytes").training_bytes
    x = torch.ones(1000, requires_grad=True)

    def compute() -> None:
        x.mul(2).exp().sin().sum().backward()

    kept, peak = training_bytes(compute)
    one = 4000
    # exp keeps its result, which sin keeps as its input; the sum and the 1 that backward begins with are 4 bytes each.
    assert kept == one + 8
    # In backward: the cosine beside what is kept, and the gradient of it.
    assert kept + one <= peak <= kept + 3 * one
    with pytest.raises(AssertionError, match="nothing ran backward"):
        training_bytes(lambda: None)


def test_a_need_is_found_from_its_peaks(load) -> None:  # type: ignore[no-untyped-def]
    longest = load("sequence_longest")
    need = longest.Need(constant=5e6, whole=300.0, shared=9000.0)
    peaks = {(ranks, length): need(ranks, length) for ranks in (1, 2, 4) for length in (512, 1024, 4096)}
    found = longest.fit(peaks)
    assert longest.error([found], peaks) < 1e-9
    assert longest.error([found], peaks | {(4, 4096): 1.1 * need(4, 4096)}) == pytest.approx(1 - 1 / 1.1)


def test_no_part_of_a_need_is_below_0(load) -> None:  # type: ignore[no-untyped-def]
    longest = load("sequence_longest")
    peaks = {
        (ranks, length): 1e6 + (9000 / ranks - 100) * length for ranks in (2, 4) for length in (512, 4096)
    }
    found = longest.fit(peaks)
    assert found.whole == 0
    assert found.shared == pytest.approx(8700, rel=0.02)
    assert 0 < longest.error([found], peaks) < 0.05


def test_the_longest_sequence_satisfies_all_needs(load) -> None:  # type: ignore[no-untyped-def]
    longest = load("sequence_longest")
    needs = {
        "most": longest.Need(constant=1000, whole=0, shared=10),
        "first": longest.Need(constant=0, whole=2, shared=1),
    }
    found = longest.simulated(needs, 11_000, (1, 2, 8))
    assert found["longest"] == {"1": 1000, "2": 2000, "8": int(11_000 / 2.125)}


def test_bytes_before_the_layers_leave_out_those_within(load) -> None:  # type: ignore[no-untyped-def]
    bytes_before_layers = load("live_bytes").bytes_before_layers
    embedding, layer = (
        torch.nn.Embedding(4, 10),
        torch.nn.Sequential(torch.nn.Linear(10, 1000), torch.nn.Tanh()),
    )
    tokens = torch.zeros(25, dtype=torch.long)

    def compute() -> None:
        layer(embedding(tokens)).sum().backward()

    before = bytes_before_layers(compute, embedding=embedding, first_layer=layer)
    # The embedding's output or its gradient, 25 × 10 floats; the layer's gradients, 11 × 1000, are there by then.
    assert 11_000 * 4 + 1000 <= before < 11_000 * 4 + 4000
    assert not layer._forward_pre_hooks and not embedding._forward_hooks


@pytest.mark.parametrize(("start", "memory"), [(64, 5000), (320, 5000), (4000, 5000), (320, 5199)])
def test_the_longest_sequence_is_found_from_either_side(load, start: int, memory: float) -> None:  # type: ignore[no-untyped-def]
    search = load("sequence_longest").search
    assert search(lambda length: 200 + 15 * length, start=start, unit=32, memory=memory) == 320
    assert search(lambda length: 1e6, start=start, unit=32, memory=memory) == 0


def test_the_last_line_is_of_the_fastest_and_of_the_leanest(load) -> None:  # type: ignore[no-untyped-def]
    found = {
        "seconds": {"echelon a": [3.0], "echelon b": [1.0], "torch a": [2.0], "torch b": [4.0]},
        "bytes": {
            "echelon a": {"kept": 1},
            "echelon b": {"kept": 9},
            "torch a": {"kept": 8},
            "torch b": {"kept": 4},
        },
    }
    assert load("sequence").last_line(found) == {"ratio_to_best_peer": 0.5, "bytes_to_best_peer": 0.25}
