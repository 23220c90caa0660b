"""Masks with a copy on the host: transformers reads them without waiting for the device."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from echelon.pipeline.host_masks import TensorWithHostCopy, mask_of_all, with_host_copies
from echelon.pipeline.microbatch import split
from echelon.pipeline.stage import Stage

from ..host_reads import host_reads

ROWS, LENGTH = 3, 16
SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
)
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES),
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, num_key_value_heads=2, sliding_window=8
    ),
    "GPT2LMHeadModel": transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    ),
    "BertForMaskedLM": transformers.BertConfig(**SIZES),
    "T5ForConditionalGeneration": transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}


def known(host: Tensor) -> Tensor:
    name = "attention_mask"
    return with_host_copies({name: host.clone()}, {name: host}, nn.Linear(1, 1))[name]


def batch_of(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    padded = (torch.arange(LENGTH) < torch.tensor([[16], [12], [9]])).long()
    if kind in ("whole", "padded"):
        batch["attention_mask"] = padded if kind == "padded" else torch.ones_like(ids)
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)]).expand(ROWS, -1).contiguous()
    return batch


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_no_mask_and_computes_the_same(name: str, kernel: str) -> None:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, name)
    if kernel == "sdpa" and not kind._supports_sdpa:
        pytest.skip("this release has no sdpa for it")
    model = kind._from_config(MODELS[name], attn_implementation=kernel).eval()
    stage = Stage(model)
    for texts in ("plain", "whole", "padded", *["packed"] * (name != "T5ForConditionalGeneration")):
        batch = batch_of(texts)
        moved = with_host_copies({name: tensor.clone() for name, tensor in batch.items()}, batch, model)
        if name != "BertForMaskedLM" and texts != "packed":  # masks with a cache, which models use by default
            batch["use_cache"], moved["use_cache"] = False, False  # type: ignore[assignment]
        with host_reads() as reads:
            logits = stage.forward(moved, ()).logits
        assert not reads, texts
        assert torch.equal(logits, model(**batch).logits), texts
        assert type(logits) is Tensor


def test_results_of_other_operations_are_plain_tensors() -> None:
    mask = known(torch.ones(2, 4, dtype=torch.long))
    assert type(mask.float()) is Tensor
    assert type(mask[torch.tensor([0])]) is Tensor
    assert type(mask == torch.ones(2, 4)) is Tensor
    assert isinstance(mask.to(torch.bool)[:, :2], TensorWithHostCopy)


def test_values_are_read_from_the_hosts_copy() -> None:
    mask = known(torch.tensor([[1, 1, 0]]))
    on_device = mask.as_subclass(Tensor)
    assert not mask.all() and mask.any() and mask.sum() == 2
    on_device.untyped_storage().fill_(0)  # as if the device has not computed them yet
    assert mask.any() and (mask[:, :2] == 1).all() and int(mask.sum()) == 2
    assert (~mask.bool()).tolist() == [[False, False, True]]


def test_microbatches_have_answers_of_their_own() -> None:
    mask = known(torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]]))
    parts = split({"attention_mask": mask}, num_microbatches=2, microbatch_size=None)
    assert [bool(microbatch["attention_mask"].all()) for microbatch in parts] == [True, False]
    assert [int(microbatch["attention_mask"].sum()) for microbatch in parts] == [4, 1]


def test_a_change_in_place_is_seen() -> None:
    mask = known(torch.ones(1, 3, dtype=torch.long))
    view = mask[:, 1:]
    mask[0, 1] = 0
    assert not view.all() and not mask.all() and mask.sum() == 2


def test_mask_functions_that_are_compiled_get_plain_masks() -> None:
    """Layers of flash attention do too; if the mask hides nothing, none of them gets it."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    batch = {"attention_mask": torch.tensor([[1, 0]]), "decoder_attention_mask": torch.ones(1, 2)}
    for kernel, kinds in (
        ("sdpa", [TensorWithHostCopy, TensorWithHostCopy]),
        ("flex_attention", [Tensor, Tensor]),
        ("flash_attention_2", [Tensor, TensorWithHostCopy]),
        ("echelon_ring_attn", [Tensor, TensorWithHostCopy]),
    ):
        model.config._attn_implementation = {"": kernel}
        assert [type(tensor) for tensor in with_host_copies(batch, batch, model).values()] == kinds, kernel


def test_a_compiled_model_gets_plain_tensors() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.compile(backend="eager")
    batch = batch_of("padded")
    assert with_host_copies(batch, batch, model) is batch
    assert type(Stage(model).forward(batch, ()).loss) is Tensor


def test_tensors_without_a_copy_on_the_host_are_unchanged() -> None:
    model = nn.Linear(1, 1)
    with torch.inference_mode():
        assert type(mask_of_all(torch.ones(1, 3))) is Tensor
    for batch in (torch.ones(1, 3), [torch.ones(1, 3)], {"input_ids": torch.ones(1, 3)}):
        copied = with_host_copies(batch, batch, model)
        assert copied is batch or type(copied["input_ids"]) is Tensor
    on_meta = {"attention_mask": torch.ones(1, 3, device="meta")}
    assert type(with_host_copies(on_meta, on_meta, model)["attention_mask"]) is Tensor
