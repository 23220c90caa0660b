"""Choice of a model's attention, and xFormers' arguments."""

from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from echelon.shardformer import ShardConfig
from echelon.shardformer.fused import FusedKernels
from echelon.shardformer.layers.attention_kernels import (
    FLASH_PACKAGES,
    KERNELS,
    SDPA,
    XFORMERS,
    attention_errors,
    register_kernels,
    set_attention,
    torch_attention,
    xformers_attention,
)
from echelon.verify.model_choice import ModelChoice

from ..models.stand_ins import installed, installed_xformers
from .compare import Attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
B, N, Q, D = 2, 4, 5, 8


PARTS = pytest.mark.skipif(
    "blip_2_vision_model" not in transformers.CONFIG_MAPPING, reason="no small model of several can be built"
)


def tensors(*, groups: int = 1, keys: int = Q, value_width: int = D) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, N, Q, D), (B, N // groups, keys, D), (B, N // groups, keys, value_width)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def fused_by_torch(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = D**-0.5,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention by torch's function, with the signature of transformers' attention functions."""
    is_causal = module.is_causal if is_causal is None else is_causal
    added = torch.zeros(query.shape[2], key.shape[2])
    if attention_mask is None and is_causal:
        attention_mask = torch.ones(added.shape, dtype=torch.bool).tril()
    if attention_mask is not None:
        is_boolean = attention_mask.dtype == torch.bool
        added = added.masked_fill(~attention_mask, -torch.inf) if is_boolean else attention_mask
    added = added if position_bias is None else added + position_bias
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, added, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


LENGTHS = torch.tensor([5, 3])
BOOLEAN = (torch.arange(Q) < LENGTHS[:, None])[:, None, None, :] & torch.ones(Q, Q, dtype=torch.bool).tril()
ADDED = torch.zeros(B, 1, Q, Q).masked_fill(~BOOLEAN, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(attention_mask=None),
        dict(attention_mask=ADDED, scaling=0.3),
        dict(attention_mask=BOOLEAN, groups=4, value_width=6, sliding_window=3),
        dict(attention_mask=BOOLEAN, has_position_bias=True),
        dict(attention_mask=None, has_position_bias=True),
        dict(attention_mask=None, has_position_bias=True, is_causal=False),
        dict(attention_mask=None, keys=7),
    ],
    ids=["causal", "added", "groups and widths", "bias and mask", "bias", "bias and all", "longer"],
)
def test_xformers_computes_what_torch_does(arguments: dict[str, Any]) -> None:
    shapes = {name: arguments[name] for name in ("groups", "keys", "value_width") if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in (*shapes, "has_position_bias")}
    module = Attention(arguments.get("groups", 1))

    def run(attention: Any) -> list[Tensor]:
        inputs = tensors(**shapes)
        if "has_position_bias" in arguments:  # T5's: a view of another order
            inputs.append(torch.randn(Q, Q, N, requires_grad=True))
            rest["position_bias"] = inputs[-1].permute(2, 0, 1)[None]
        out, weights = attention(module, *inputs[:3], **rest)
        assert weights is None
        (out * torch.arange(out.shape[-1]).cos()).sum().backward()
        return [out, *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    expected = run(fused_by_torch)
    with installed_xformers() as called:
        computed = run(xformers_attention)
    assert called.call_count == 1
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)


def test_dropout_reaches_xformers_and_is_drawn_from_the_generator() -> None:
    with installed_xformers() as called:
        outs = []
        for seed in (1, 1, 2):
            query, key, value = tensors()
            torch.manual_seed(seed)
            outs.append(xformers_attention(Attention(), query, key, value, None, dropout=0.5)[0])
    assert called.call_args.kwargs["p"] == 0.5
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_a_query_that_sees_nothing_gets_0_as_by_sdpa() -> None:
    with installed_xformers():
        mask = torch.ones(B, 1, Q, Q, dtype=torch.bool)
        mask[:, :, 1] = False
        out, _ = xformers_attention(Attention(), *tensors(), mask)
    assert not out[:, 1].any() and out[:, 2].all()


@pytest.mark.parametrize(
    ("model_type", "kernel", "words"),
    [
        ("bloom", SDPA, "BloomForCausalLM cannot compute attention with sdpa"),
        ("gemma2", SDPA, "caps its attention scores (attn_logit_softcapping=50.0)"),
        ("gemma2", XFORMERS, "caps its attention scores (attn_logit_softcapping=50.0)"),
        ("gpt_neo", XFORMERS, "GPTNeoForCausalLM was built with GPTNeoSelfAttention"),
        pytest.param("sam", XFORMERS, "was built with SamVisionSdpaAttention", marks=PARTS),
        ("t5", "flash_attention_2", "T5Stack (encoder) cannot compute attention with flash_attention_2"),
    ],
)
def test_an_unsupported_model_is_refused_by_name_with_advice(
    model_type: str, kernel: str, words: str
) -> None:
    register_kernels()
    model = ModelChoice(model_type=model_type).build_on_meta()
    message = "\n".join(attention_errors(model, kernel, "enable_it"))
    assert words in message and "leave enable_it out" in message


def test_attention_that_was_fixed_when_a_model_was_built_is_not_replaced() -> None:
    choice = ModelChoice(model_type="falcon")
    config = choice.config()
    config._attn_implementation = "eager"
    model = transformers.FalconForCausalLM(config)
    assert "build it with attn_implementation='sdpa'" in "\n".join(attention_errors(model, SDPA, "x"))
    assert attention_errors(choice.build_on_meta(), SDPA, "x") == []


def test_a_model_that_is_not_transformers_is_refused() -> None:
    (error,) = attention_errors(nn.Sequential(nn.Linear(2, 2)), SDPA, "enable_flash_attention")
    assert "Sequential is not a transformers model" in error


@PARTS
def test_every_model_inside_a_model_is_set() -> None:
    model: Any = ModelChoice(model_type="blip-2").build_on_meta()
    model.set_attn_implementation("eager")
    texts = (model.language_model.encoder, model.language_model.decoder)
    submodels = (model, model.vision_model, model.qformer, *texts)
    assert {submodel.config._attn_implementation for submodel in submodels} == {"eager"}
    set_attention(model, SDPA)
    assert {submodel.config._attn_implementation for submodel in submodels} == {"sdpa"}


def test_missing_packages_are_named_with_all_other_errors() -> None:
    both = FusedKernels(flash_attention=True, xformers=True)
    message = "\n".join(both.errors(CUDA, torch.float32))
    assert all(words in message for words in ("give one of them", "package flash-attn", "only in 16 bits"))
    assert "package xformers" in message
    assert len(both.errors(CUDA, torch.float32)) == 4
    with installed(xformers__ops={}, flash_attn={}):
        assert FusedKernels(flash_attention=True).errors(CUDA, torch.bfloat16) == []
        assert FusedKernels(xformers=True).errors(CUDA, torch.float32) == []
        (error,) = FusedKernels(xformers=True).errors(CPU, torch.float32)
        assert "computes on cuda and not on cpu" in error
    assert FusedKernels(flash_attention=True).errors(CPU, torch.float32) == []


@pytest.mark.parametrize(
    ("name", "device", "dtype", "words"),
    [
        (
            "flash_attention_3",
            CUDA,
            torch.bfloat16,
            "needs the package flash-attn-3 (install it from the folder hopper",
        ),
        (
            "flash_attention_2",
            CPU,
            torch.bfloat16,
            "computes on cuda and not on cpu: use enable_flash_attention='sdpa'",
        ),
        ("sdpa_cudnn", CUDA, torch.float32, "sdpa_cudnn (cuDNN's kernel) computes only in 16 bits"),
        ("sdpa_fa", CPU, None, "computes on cuda and not on cpu"),
        ("flex_attention", CPU, torch.float32, "computes on cuda and not on cpu"),
        ("sdpa_fa", CUDA, torch.bfloat16, ""),
        ("sdpa", CPU, torch.float32, ""),
        ("eager", CUDA, torch.float32, ""),
    ],
)
def test_a_kernel_by_name_is_refused_if_it_is_not_supported(
    name: str, device: torch.device, dtype: torch.dtype | None, words: str
) -> None:
    errors = ShardConfig(enable_flash_attention=name).fused.errors(device, dtype)
    is_refused = any(words in error and f"enable_flash_attention={name!r}" in error for error in errors)
    assert is_refused == bool(words)


def test_an_older_gpu_is_refused_by_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, is_refused in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            errors = FusedKernels(flash_attention="sdpa_fa").errors(CUDA, torch.float16)
        assert [("this one has 7.5" in error) for error in errors] == [True] * is_refused


def test_ring_attention_has_its_own_kernels() -> None:
    errors = FusedKernels(flash_attention="flash_attention_3", is_ring=True).errors(CUDA, torch.bfloat16)
    assert "sequence_parallelism_mode='ring_attn', which has kernels of its own" in errors[0]
    for name in (True, "sdpa", "eager"):  # none needs a package
        assert FusedKernels(flash_attention=name, is_ring=True).errors(CUDA, torch.bfloat16) == []
    with installed(xformers__ops={}):
        (error,) = FusedKernels(xformers=True, is_ring=True).errors(CUDA, torch.bfloat16)
    assert "enable_xformers=True with sequence_parallelism_mode='ring_attn'" in error


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if not kernel.supports_dropout])
def test_attention_dropout_is_refused_where_it_would_be_lost(name: str) -> None:
    choice = ModelChoice(model_type="llama", settings=(("attention_dropout", 0.1),))
    (error,) = attention_errors(choice.build_on_meta(), name, "enable_it")
    assert "uses attention dropout (attention_dropout=0.1)" in error
    assert "set that to 0 in the config" in error
    assert attention_errors(ModelChoice(model_type="llama").build_on_meta(), name, "enable_it") == []


def test_flash_attention_3_is_refused_for_the_same_masks_as_2() -> None:
    errors = [
        attention_errors(ModelChoice(model_type="bart").build_on_meta(), name, "x") for name in FLASH_PACKAGES
    ]
    assert all(any("the decoder's padding" in error for error in refusals) for refusals in errors)


def test_one_of_torchs_kernels_is_set_by_name_and_computes_alone() -> None:
    model: Any = ModelChoice(model_type="llama").build()
    set_attention(model, "sdpa_cudnn")
    assert model.config._attn_implementation == "sdpa_cudnn"
    arguments = (Attention(), *tensors(), None)
    backends = {SDPA: lambda *args, **kwargs: _cur_sdpa_kernel_backends()}
    with mock.patch.dict(transformers.AttentionInterface._global_mapping, backends):
        enabled = KERNELS["sdpa_cudnn"].attend(*arguments, scaling=0.3)
    assert enabled == [SDPBackend.CUDNN_ATTENTION]
    output, _ = torch_attention(*arguments, backend=SDPBackend.FLASH_ATTENTION, scaling=0.3)
    expected, _ = fused_by_torch(*arguments, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_all_optimization_asks_for_all_but_xformers() -> None:
    asked = ShardConfig(enable_all_optimization=True).fused
    assert asked == FusedKernels(flash_attention=True, normalization=True, jit=True)
    assert ShardConfig().fused == FusedKernels()
