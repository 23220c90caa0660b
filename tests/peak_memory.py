"""Peak memory of one rank of many, by torch's memory tracker on fake tensors: nothing is computed, nothing allocated.

    python -m tests.peak_memory "70B tp8·pp8·dp64" middle recomputed

Prints one line of JSON. The ranks that are not there are those of `tests/gpu/many.py`, which measures true peaks.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster
from echelon.cluster import mesh
from echelon.cluster.collectives import InFlight

from .gpu.many import CLUSTERS, Cluster, one_of_many, plugin_of
from .pretended_device import ReadOnes, really


class AllIsValid(ReadOnes):
    """Of tokens too, which an embedding asks."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(function, types, args, kwargs)
        return True if found is False else found


class Tracker(MemTracker):
    """torch's, by operators alone: what it does besides for each module does not know microbatches."""

    def _pre_fw_hook(self, *_: Any) -> None:
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook


def own_row(
    values: Sequence[int], group: dist.ProcessGroup | None = None, call: str | None = None
) -> InFlight[list[tuple[int, ...]]]:
    """As `begin_gather_integers` of ranks that all have what this one has."""
    rows = [tuple(values)] * dist.get_world_size(group)
    return InFlight(None, torch.empty(0), lambda _: rows)


def released(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`Module._apply` where it releases layers of other stages; torch cannot swap fake parameters."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, each in module._parameters.items():
        if each is not None and (made := function(each)).is_meta:
            module._parameters[name] = nn.Parameter(made, each.requires_grad)
    return module


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Let boost and a step work on them, as far as they are no tensors that hold numbers."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(AllIsValid())
        stack.enter_context(patch.object(nn.Module, "_apply", released))
        for owner, name in ((mesh, "_line_of"), (mesh.ParallelMesh, "_along")):  # numbers of ranks are real
            stack.enter_context(patch.object(owner, name, really(getattr(owner, name))))
        for target, other in (
            ("echelon.cluster.agree.begin_gather_integers", own_row),
            ("echelon.plugins.hybrid_model.require_equal_boosts", lambda *_: None),
            ("echelon.plugins.engine.batch_hash", lambda _: 0),
            ("echelon.plugins.engine.PipelineLoss", FakeTensor),
            ("echelon.plugins.engine.PipelineEngine._returns_weights", lambda *_, **__: False),
            ("echelon.shardformer.layers.parallel_module.LazyTensor", FakeTensor),
            # Masks of fake tensors are those of a graph that is traced for any batch.
            ("transformers.masking_utils.is_tracing", lambda *_: False),
        ):
            stack.enter_context(patch(target, other))
        yield


def measure(cluster: Cluster, place: str, *, is_recomputed: bool) -> dict[str, Any]:
    """Bytes of a warm step: at its peak, what the ledger holds, and the layers of this stage."""
    with one_of_many(cluster, cluster.ranks[place]):
        plugin = plugin_of(cluster)
        with fake_tensors():
            torch.set_default_dtype(torch.bfloat16)
            model = LlamaForCausalLM(LlamaConfig(**cluster.sizes, max_position_embeddings=cluster.length))
            torch.set_default_dtype(torch.float32)
            if is_recomputed:
                model.gradient_checkpointing_enable()
            booster = Booster(plugin=plugin)
            boosted: Any
            optimizer: Any
            boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
            tokens = torch.randint(cluster.sizes["vocab_size"], (cluster.microbatches, cluster.length))

            def step() -> None:
                batch = {"input_ids": tokens, "labels": tokens}
                booster.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)
                optimizer.step()
                optimizer.zero_grad()

            step()
            held = plugin.ledger(optimizer).held
            assert held is not None
            tracker = Tracker()
            tracker.track_external(boosted.module, optimizer.inner)
            with tracker:
                step()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        names = dict(boosted.named_parameters())
        return {
            "peak": peak["Total"] + held["masters"],  # which the tracker was not told of
            "held": sum(held.values()),
            "layers": sum("input_layernorm" in name for name in names),
            "stage": plugin.mesh.rank("pp"),
            "kinds": {str(kind).rpartition(".")[2]: nbytes for kind, nbytes in peak.items()},
            "ledger": held,
        }


if __name__ == "__main__":
    name, place, *rest = sys.argv[1:]
    chosen = CLUSTERS[name]
    print(
        json.dumps(measure(replace(chosen, microbatches=chosen.axes[1] + 1), place, is_recomputed=bool(rest)))
    )
