"""Splitting batches into microbatches and merging their results."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from echelon.pipeline.microbatch import batch_size, map_tensors, merge, signature, split


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def rows(count: int) -> Tensor:
    return torch.arange(count * 2).view(count, 2)


def in_two(batch: Any) -> Any:
    return split(batch, num_microbatches=2, microbatch_size=None)


@pytest.mark.parametrize(
    "total, num_microbatches, microbatch_size, expected",
    [
        (6, 3, None, [2, 2, 2]),
        (7, 3, None, [3, 2, 2]),
        (8, 3, None, [3, 3, 2]),
        (7, None, 2, [2, 2, 2, 1]),
        (7, None, 9, [7]),
        (7, 7, None, [1] * 7),
        (7, 4, 2, [2, 2, 2, 1]),
    ],
)
def test_a_batch_is_cut_evenly_or_by_size(
    total: int, num_microbatches: int | None, microbatch_size: int | None, expected: list[int]
) -> None:
    batch = rows(total)
    microbatches = split(batch, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    assert [len(microbatch) for microbatch in microbatches] == expected
    assert torch.equal(torch.cat(microbatches), batch)


def test_microbatches_share_the_memory_of_the_batch() -> None:
    batch = rows(4)
    assert [part.data_ptr() for part in in_two(batch)] == [batch.data_ptr(), batch[2:].data_ptr()]


def test_positions_of_several_axes_are_cut_along_the_batch() -> None:
    batch = {"input_ids": rows(3), "text": {"position_ids": torch.arange(18).view(3, 3, 2)}}
    microbatches = split(batch, num_microbatches=3, microbatch_size=None)
    positions = [microbatch["text"]["position_ids"] for microbatch in microbatches]
    assert [ids[0].tolist() for ids in positions] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    torch.testing.assert_close(merge(microbatches)["text"], batch["text"])
    assert batch_size({"position_ids": torch.zeros(4, 6, 2), "labels": rows(6)}) == 6


def test_nested_batches_keep_their_containers() -> None:
    batch = {"a": rows(3), "b": [rows(3), (rows(3), None)], "pair": Pair(rows(3), rows(3))}
    first, second = in_two(batch)
    assert first["a"].tolist() == [[0, 1], [2, 3]]
    assert second["b"][1][0].tolist() == [[4, 5]] and second["b"][1][1] is None
    assert isinstance(first["b"], list) and isinstance(first["b"][1], tuple)
    assert type(second["pair"]) is Pair and second["pair"].right.tolist() == [[4, 5]]


def test_lists_of_the_objects_of_images_are_cut_between_images() -> None:
    def objects(count: int) -> dict[str, Tensor]:
        return {"class_labels": torch.arange(count), "boxes": torch.rand(count, 4)}

    labels, masks = [objects(3), objects(3), objects(1)], [torch.ones(n, 2, 2) for n in (3, 3, 3)]
    batch = {"pixel_values": rows(3), "labels": labels, "mask_labels": masks}
    first, second = in_two(batch)
    assert first["labels"] == labels[:2] and second["labels"] == labels[2:]
    assert first["mask_labels"] == masks[:2] and second["mask_labels"] == masks[2:]
    moved = map_tensors(second, torch.Tensor.double)
    assert moved["labels"][0]["boxes"].dtype is torch.float64
    with pytest.raises(ValueError, match="pixel_values has 3, labels has 2, mask_labels has 3"):
        batch_size(batch | {"labels": labels[:2]})


@pytest.mark.parametrize("kind", [dict, OrderedDict, BatchEncoding])
def test_every_mapping_becomes_a_plain_dict(kind: Any) -> None:
    microbatches = in_two(kind({"input_ids": rows(2)}))
    assert [type(microbatch) for microbatch in microbatches] == [dict, dict]
    assert microbatches[1]["input_ids"].tolist() == [[2, 3]]


def test_values_without_a_batch_dimension_go_to_every_microbatch() -> None:
    temperature = torch.tensor(0.5)
    batch = {"x": rows(2), "temperature": temperature, "name": "two", "flag": True, "none": None}
    for microbatch in in_two(batch):
        assert microbatch["temperature"] is temperature
        assert (microbatch["name"], microbatch["flag"], microbatch["none"]) == ("two", True, None)


def test_the_batch_size_is_the_common_length() -> None:
    assert batch_size({"x": rows(5), "y": [torch.zeros(5)]}) == 5


def test_merging_the_microbatches_gives_back_the_batch() -> None:
    batch = {"a": rows(7), "b": (rows(7).float(), None), "c": "same"}
    merged = merge(split(batch, num_microbatches=3, microbatch_size=None))
    assert torch.equal(merged["a"], batch["a"]) and torch.equal(merged["b"][0], batch["b"][0])
    assert merged["b"][1] is None and merged["c"] == "same" and isinstance(merged["b"], tuple)


def test_model_outputs_are_merged_by_field_and_keep_their_class() -> None:
    states = (rows(2), rows(2))
    losses = (torch.tensor(0.0), torch.tensor(1.0))
    outputs = [CausalLMOutputWithPast(loss=loss, logits=rows(2), hidden_states=states) for loss in losses]
    merged = merge(outputs)
    assert type(merged) is CausalLMOutputWithPast
    assert merged.loss.item() == 0.5
    assert merged.logits.shape == (4, 2) and len(merged.hidden_states) == 2
    assert merged.hidden_states[1].shape == (4, 2)
    assert merged.past_key_values is None


def test_whole_numbers_without_dimensions_are_averaged_as_floats() -> None:
    assert merge([torch.tensor(1), torch.tensor(2)]).item() == 1.5


def test_values_that_differ_become_a_list() -> None:
    assert merge([{"n": 1, "m": 2}, {"n": 1, "m": 3}]) == {"n": 1, "m": [2, 3]}


def test_the_signature_knows_names_shapes_and_dtypes_only() -> None:
    batch = {"x": rows(2), "n": 3}
    assert signature(batch) == signature({"x": rows(2) + 1, "n": 4})
    assert hash(signature(batch)) == hash(signature(dict(batch)))
    others = [{"y": rows(2)}, {"x": rows(3)}, {"x": rows(2).float()}, {"x": rows(2), "z": rows(2)}]
    assert len({signature(other) for other in [batch, *others]}) == 5


def test_mapping_over_tensors_keeps_the_structure() -> None:
    output = CausalLMOutputWithPast(logits=torch.ones(2, requires_grad=True) * 2)
    detached = map_tensors(output, Tensor.detach)
    assert type(detached) is CausalLMOutputWithPast and not detached.logits.requires_grad


def test_a_microbatch_that_is_changed_in_place_leaves_the_others_to_autograd() -> None:
    batch = {"labels": torch.tensor([[0, -100], [1, -100]])}
    first, second = in_two(batch)
    scores = torch.zeros(2, 3, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(scores, first["labels"].flatten())  # saves the labels
    second["labels"].masked_fill_(second["labels"] == -100, 2)  # as FSMT's forward does
    loss.backward()
    assert batch["labels"].tolist() == [[0, -100], [1, 2]]
