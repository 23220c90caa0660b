"""Peak memory of one rank in a large world, by torch's memory tracker on fake tensors, without computation.

    python -m tests.peak_memory "70B tp8·pp8·dp64" middle recomputed

Prints one line of JSON. The other ranks are simulated, as in `tests/gpu/many.py`, which measures real peaks.
"""

import json
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster

from .fakes import fake_tensors
from .gpu.many import CLUSTERS, Cluster, one_of_many, plugin_of


class Tracker(MemTracker):
    """torch's tracker of operators only: its hooks on modules do not support microbatches."""

    def _pre_fw_hook(self, *_: Any) -> None:
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook


def measure(cluster: Cluster, place: str, *, is_recomputed: bool) -> dict[str, Any]:
    """Return the bytes of a warm step: the peak, the bytes in the ledger, and the layers of this stage."""
    with one_of_many(cluster, cluster.ranks[place]):
        plugin = plugin_of(cluster)
        # With fake tensors transformers would make masks as for a traced graph of any batch; here all tokens are valid.
        with fake_tensors(flag=True), patch("transformers.masking_utils.is_tracing", lambda *_: False):
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
            "peak": peak["Total"] + held["masters"],  # the tracker does not see them
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
