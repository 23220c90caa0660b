"""FLOPs of a token, compared with torch's counter, and peaks of devices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM

from echelon import flops_per_token
from echelon.booster import flops

SMALL = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_key_value_heads=2
)
MIXTURE = SMALL | dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", SMALL),
        ("qwen3", SMALL | dict(head_dim=32)),
        ("gpt2", dict(n_embd=64, n_layer=2, n_head=4)),
        ("mixtral", MIXTURE),
    ],
)
def test_they_are_three_times_those_of_a_forward_by_torch_s_counter(model_type: str, settings: dict) -> None:
    config = AutoConfig.for_model(model_type, vocab_size=200, attn_implementation="eager", **settings)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(200, (2, 48))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    # Beside the formula only the products of rotary frequencies.
    assert flops_per_token(model, 48) == pytest.approx(3 * counter.get_total_flops() / ids.numel(), rel=5e-3)


def test_a_table_of_positions_counts_nothing_and_a_tied_head_once() -> None:
    config = BertConfig(vocab_size=100, hidden_size=8, num_hidden_layers=0, num_attention_heads=2)
    model = BertForMaskedLM(config)
    assert flops_per_token(model, 1) == 6 * (100 * 8 + 8 * 8)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("cuda:0: NVIDIA H100 80GB HBM3, 79 GiB", 989e12),
        ("cuda:0: NVIDIA H100 PCIe, 79 GiB", 756e12),
        ("cuda:0: NVIDIA A100-SXM4-40GB, 40 GiB", 312e12),
        ("cuda:0: NVIDIA L40S, 44 GiB", 362e12),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_follows_from_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(flops, "described", lambda device: name)
    assert flops.peak_flops(torch.device("cpu"), "bf16") == peak
    assert flops.peak_flops(torch.device("cpu"), "fp32") is None
