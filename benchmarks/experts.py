r"""Step times of Echelon's expert parallelism, compared with transformers' and with plain data parallelism.

    python benchmarks/experts.py --json times.json --plot times.png
    python benchmarks/experts.py --dp 4 --experts 16

All train the same Mixtral, each rank on its samples. Every round runs one step of each contender, in a rotating order.
A ratio is the median of the rounds' ratios. The last line compares Echelon's experts at stage 1 with the fastest of the
others. Run it on an idle machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import report
import torch
import torch.distributed as dist
from arguments import common_parser, parse, workload_of
from comparison import compare
from data_parallel import DataParallel, local_samples
from echelon_batch import EchelonBatch
from launch import enter
from memory import measure_held
from stepped import gradients_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig
from workload import ADAMW, Workload
from zero_peers import TorchDDP, TorchFSDP

from echelon.cluster.device import default_device

MAIN = "echelon experts, stage 1"  # the contender of the last line


@dataclass(frozen=True, kw_only=True)
class Mixture(Workload):
    """A Mixtral of the sizes of the Llama, whose gated layers are divided among the experts of a token.

    Args:
        experts: experts of a layer.
        chosen: experts of a token.
    """

    experts: int = 8
    chosen: int = 2
    model_class: ClassVar[Any] = MixtralForCausalLM

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.chosen} of {self.experts} experts".replace("Llama", "Mixtral")

    @property
    def config(self) -> MixtralConfig:
        """The model's config; its experts compute by the grouped product."""
        llama = super().config.to_dict()
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
            "use_cache",
        )
        return MixtralConfig(
            **{name: llama[name] for name in names},
            intermediate_size=-(-self.intermediate // self.chosen // 32) * 32,
            num_local_experts=self.experts,
            num_experts_per_tok=self.chosen,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )


class EchelonExperts(DataParallel, EchelonBatch):
    """A layout of HybridParallelPlugin, whose ranks have samples of their own."""

    def __init__(self, name: str, workload: Workload, **layout: Any) -> None:
        EchelonBatch.__init__(self, name, workload, **layout)
        self._batch = local_samples(workload, self._plugin.mesh.device)


class TransformersExperts(DataParallel):
    """transformers' own plans: experts exchange tokens by all-to-all, and FSDP2 shards everything else."""

    name = "transformers experts, FSDP2"

    def __init__(self, workload: Workload, device: torch.device) -> None:
        model = workload.model().to(device)
        size = dist.get_world_size()
        config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
        # Not through from_pretrained, which loads weights from files.
        _, _, mesh = type(model).prepare_distribute_model(config)
        model = type(model).maybe_distribute_model(model, config, mesh)
        super().__init__(model, _adamw(model), batch=local_samples(workload, device))

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the averaged gradients, gathered. Communicates."""
        return {name: gradient.full_tensor() for name, gradient in gradients_of(self._model).items()}


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of every contender; its fused kernel refuses DTensors of several meshes in a group."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return torch.optim.AdamW([{"params": parameters} for parameters in groups.values()], **ADAMW)


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--dp", type=int, default=2, help="ranks, each with its samples and its experts")
    parser.add_argument("--experts", type=int, default=Mixture.experts, help="of a layer")
    parser.add_argument("--chosen", type=int, default=Mixture.chosen, help="experts of a token")
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.dp, option="--dp", matmul=arguments.matmul)
    workload = workload_of(arguments, Mixture, microbatches=1)
    compare(
        make_contenders(workload, arguments.dp),
        workload,
        arguments,
        main=MAIN,
        layout=f"dp {arguments.dp}",
        measure_more=lambda contenders: {"held": measure_held(contenders)},
        show_more=show_bytes,
    )


def make_contenders(workload: Workload, num_ranks: int) -> list[DataParallel]:
    """Return all contenders, with equal weights. Collective over the world."""
    device = default_device()
    return [
        EchelonExperts("echelon experts, stage 0", workload, ep_size=num_ranks, zero_stage=0),
        EchelonExperts(MAIN, workload, ep_size=num_ranks, zero_stage=1),
        EchelonExperts("echelon stage 1", workload, zero_stage=1),
        TransformersExperts(workload, device),
        TorchDDP(workload, device),
        TorchFSDP(workload, device, reshard=True),
    ]


def show_bytes(results: Mapping[str, Any]) -> None:
    """Print the bytes of the contenders' tensors."""
    held = results["held"]
    ordered: Sequence[tuple[str, Any]] = report.by_median(results["summary"]["contenders"])
    rows = [[name, *(f"{size / 2**20:.1f}" for size in held[name].values())] for name, _ in ordered]
    report.show(
        "held between backward and step, on the largest rank",
        ["contender", *(f"{kind} MiB" for kind in held[MAIN])],
        rows,
    )


if __name__ == "__main__":
    main()
