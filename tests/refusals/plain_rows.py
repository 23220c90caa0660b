"""Refused calls of pipelines, data, devices, optimizers and configurations, without processes, and words of each."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import datasets
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader

from echelon import CombinedOptimizer, Muon
from echelon.checkpoint.exchange import plan_files
from echelon.cluster.errors import raise_errors
from echelon.cluster.gpus import GPUS
from echelon.cluster.layout import MeshLayout
from echelon.cluster.placement import PartialGrad, Placement, Shard, place
from echelon.derive.plans import stage_plan_of
from echelon.pipeline.action import Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.image_rows import image_rows
from echelon.pipeline.microbatch import batch_size, merge, split
from echelon.pipeline.schedules import SCHEDULES, build_schedule, gpipe
from echelon.pipeline.simulate import Costs, simulate
from echelon.pipeline.stage import with_known_cache_name
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.pipeline.stage_plan import StagePlan
from echelon.pipeline.stand_ins import Absent, Inbox, Role
from echelon.pipeline.timeline_drawing import save_timelines
from echelon.planning.meta_model import build_on_meta, load_config
from echelon.planning.search import Job
from echelon.plugins import deepspeed, internevo
from echelon.trainer.batches import loader_of_replica
from echelon.trainer.internals import ReplicaAccelerator, checkpoint_of
from echelon.verify.model_choice import ModelChoice
from echelon.zero.kinds import require_elementwise, update_kinds
from echelon.zero.precision import PrecisionConfig

from ..checkpoint.test_box import entry, holding
from ..cluster.test_device import chosen
from ..contract.matrix_rows import ARE_PLANS_OLDER
from ..data.test_dataloader import loader_of
from ..data.test_sampler import samplers
from ..data.test_user_loader import sharded
from ..pipeline.sequential import criterion, pieces, run_alone
from ..pipeline.small_schedules import written
from ..pipeline.test_cache import Takes
from ..pipeline.test_image_rows import CONFIG, numbered, texts
from ..pipeline.test_microbatch import rows
from ..pipeline.test_schedules import CUSTOM, turning
from ..pipeline.test_stage import ENCODER, STATES
from ..pipeline.test_timeline import panel
from ..shardformer.test_stages import RankAlone
from ..zero.test_kinds import Unusual, kind, matrix
from .rows import Row, Stream, entered, table


def cut(batch: Any, number: int | None = 2, size: int | None = None) -> Callable[[], Any]:
    return partial(split, batch, num_microbatches=number, microbatch_size=size)


def train(returned: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    return partial(run_alone, gpipe(1, 2)[0], 1, pieces(5, 2), criterion=returned)


def graph_of(outputs: Any, microbatch: Any) -> Any:
    return criterion(outputs, microbatch), outputs["out"].sigmoid().sum()


def deadlocked() -> Schedule:
    schedule = gpipe(2, 1)
    schedule[1].reverse()
    return schedule


def absent(use: Callable[[Any], Any]) -> Callable[[], Any]:
    layers = Absent(nn.ModuleList([nn.Identity()]), Inbox(), torch.device("cpu"), Role(Absent))
    return lambda: use(layers)


def with_config(text: str) -> Callable[[], Any]:
    """Load a config.json of this text."""

    def call() -> None:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(text)
            load_config(str(file))

    return call


def resumed(checkpoint: str | bool) -> None:
    """Resume by Trainer where checkpoint-4 was written in part, and checkpoint-9 is missing."""
    with TemporaryDirectory() as folder:
        state = Path(folder) / "checkpoint-4" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text('{"epoch": 1.0, "glob')
        checkpoint_of(checkpoint if checkpoint is True else f"{folder}/{checkpoint}", folder)


class Bucketed(BatchSampler):
    """Batches of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2], [3])


def sharing(batch_sampler: Any) -> Callable[[], Any]:
    """Share batches out to two replicas."""
    loader: Any = DataLoader(range(4), batch_sampler=batch_sampler)  # type: ignore[arg-type]
    return lambda: list(loader_of_replica(loader, rank=0, size=2, least=1))


def planned_with(memory: float) -> None:
    raise_errors(Job(world=8, memory=memory, global_batch=8, device=GPUS["h100"], precision="bf16").errors())


plan = partial(StagePlan, layers="decoder.layers", entry=("embeddings",), module="decoder")
GRID, SCALAR = torch.tensor([[1, 2, 2]]), "the criterion must return a real scalar tensor"
PICTURES: tuple[dict[str, Any], ...] = (
    {"input_ids": texts(3, 2), "pixel_values": numbered(4)},  # a sample would begin within a tile
    {"input_ids": texts(2, 2), "pixel_values": numbered(8), "image_grid_thw": torch.tensor([[1, 2, 4]])},
    {"input_ids": texts(0, 0), "pixel_values": numbered(4)},
    {"input_ids": texts(1, 1), "pixel_values": numbered(8), "image_grid_thw": GRID.repeat(2, 1),
        "image_sizes": numbered(3)},
)  # fmt: skip
# fmt: off
PIPELINES: dict[str, Row] = {
    **table("microbatches",
        (cut(rows(3), 4), "num_microbatches=4 is more than the 3 samples", "at most 3"),
        (cut({"input_ids": rows(4), "extra": [rows(4), rows(3)]}), "input_ids has 4, extra.0 has 4, extra.1 has 3"),
        (cut(rows(4), None), "neither num_microbatches nor microbatch_size is given"),
        (cut(rows(4), 0), "num_microbatches=0 must be at least 1"),
        (cut(rows(4), None, 0), "microbatch_size=0 must be at least 1"),
        (cut(rows(4), 3, 2), "microbatch_size=2 splits a batch of 4 samples into 2", "not into num_microbatches=3"),
        *((partial(batch_size, batch), "no tensor with a batch dimension")
            for batch in ({}, {"x": torch.tensor(1.0)}, "text", None)),
        *((cut(batch), "must be equally long") for batch in PICTURES),  # nobody says whose they are
        *((partial(image_rows, batch, CONFIG), "cannot be assigned to the 2 samples", "image_token_id=7", *batch)
            for batch in PICTURES),
    ),
    **table("outputs",
        (lambda: merge([]), "no outputs"),
        (lambda: merge([{"a": rows(1)}, {"b": rows(1)}]), "differs between microbatches", "dict of a; dict of b"),
        (lambda: merge([{"a": rows(1)}, {"a": None}]), "output a differs between microbatches", "Tensor; NoneType"),
        (lambda: merge([{"a": rows(1)}, {"a": torch.zeros(1, 3)}]), "a cannot be concatenated", "(1, 2)", "(1, 3)"),
        (lambda: merge([(rows(1),), (rows(1), rows(1))]), "differs between", "tuple of 1; tuple of 2"),
    ),
    **table("caches", *((lambda known=known, other=other: with_known_cache_name(Takes(known), {known: 1, other: 2}),
        "two names of one argument, the cache", f"give {known} alone")
        for known, other in (("cache", "layer_past"), ("layer_past", "cache")))),
    **table("criteria",
        (train(lambda outputs, _: outputs["out"]), SCALAR, "shape"),
        (train(lambda *_: 1.0), SCALAR, "float"),
        (train(lambda outputs, _: outputs["out"].sum() * 1j), SCALAR, "complex tensor"),
        (train(lambda *_: None), SCALAR, "NoneType"),
        (train(graph_of), "the criterion's weight has a graph"),
    ),
    **table("sizes of schedules", *((partial(SCHEDULES[name].build, p, m, 2), "a schedule cannot have", "at least 1")
        for name in SCHEDULES for p, m in ((0, 1), (1, 0), (-1, 4)))),
    **table("schedules",
        (lambda: build_schedule(CUSTOM, 3, 4, 5), "2 ranks, and the pipeline has 3", "num_model_chunks=5"),
        (lambda: build_schedule(turning, 2, 3, 1, required_stage_ranks=(0, 1)), "ranks (1, 0)", "cut for (0, 1)"),
        (lambda: simulate(deadlocked(), Costs()), "deadlocks: 0B0, 1B0 can never start"),
        *((partial(Costs, **costs), "computations must cost more than 0", "send at least 0")
            for costs in ({"forward": 0}, {"backward_input": -1}, {"backward_weight": 0}, {"send": -0.1})),
        *((partial(PipelineStageManager, RankAlone(0, 2), ranks), "must name each of the 2 pipeline ranks", "0 to 1")
            for ranks in ((0, 0), (0, 2), (0, 1, 3, 2))),
    ),
    **table("transfers", *((partial(with_communication, compute, ahead=ahead), *words) for ahead in (True, False)
        for compute, *words in (
            # 1F1 needs 0F1 needs 0B0 needs 1B0
            (written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0 waits at 0B0, which needs 1B0", "rank 1 waits at"),
            (written("0F0 0B0", "1F0 1F1 1B0 1B1"), "rank 1 waits at 1F1, which needs 0F1 (on no rank)"),
            (written("0F0 2F0 2B0 0B0", "3F0 3B0"), "no rank has stage 1"),
            (written("0F0 0B0", "0F1 0B1"), "stage 0 is on rank 0 (0F0)", "on rank 1 (0F1)"),
            (written("0F0 1B0 0B0"), "no rank has stage 1"),
        ))),
    **table("stages", *((absent(use), "reached ModuleList, which is on another stage")
        for use in (iter, lambda layers: layers[0], lambda layers: layers()))),
    **table("stage plans",
        (lambda: plan(encoder=replace(ENCODER, module="")), "needs the module whose call runs its layers"),
        (lambda: plan(encoder=ENCODER), "name the module in sent or leading"),
        (lambda: plan(encoder=ENCODER, sent={"encoder": STATES}, applied="count"), "once each: leave applied out"),
        (lambda: plan(encoder=replace(ENCODER, applied="count"), sent={"encoder": STATES}), "leave applied out"),
        (lambda: plan(applied="count", collecting=("fpn",)), "one stack of layers that run once", "one entry"),
        (lambda: stage_plan_of(nn.Linear(2, 2)), "a Linear has no config of transformers"),
    ),
    **table("timelines",
        (lambda: save_timelines([panel()], Path("a.html"), unit="ms"), "end it in one of .pdf, .png, .svg"),
        (entered(patch.dict(sys.modules, {"matplotlib": None}))(
            lambda: save_timelines([panel()], Path("a.png"), unit="ms")), "needs matplotlib", "echelon[plot]"),
    ),
}
# fmt: on


def loaded(state: Any, **changes: Any) -> Callable[[], Any]:
    """Make a call that loads another position, and requires that the sampler keeps its own."""

    def load() -> None:
        (sampler,) = samplers(8, 1)
        before = sampler.state_dict()
        try:
            sampler.load_state_dict({**before, **changes} if state is None else state)
        finally:
            assert sampler.state_dict() == before

    return load


def loaded_by_user(**changes: Any) -> Callable[[], Any]:
    return lambda: (loader := sharded()).load_state_dict({**loader.state_dict(), **changes})


POSITION = "the position in the data"
SPLITS = datasets.DatasetDict({split: datasets.Dataset.from_dict({}) for split in ("train", "test")})
# fmt: off
DATA: dict[str, Row] = {
    **table("data sets",
        (lambda: loader_of(Stream()), "the data set (Stream) is iterable-style or has no length"),
        (lambda: loader_of(one for one in "ab"), "(generator) is iterable-style or has no length"),
        (lambda: loader_of({1, 2}, 1.5), "the data set (set) has no __getitem__", "batch_size=1.5"),
        (lambda: loader_of(SPLITS), "(DatasetDict) has the keys 'train', 'test'", "no sample 0"),
        (lambda: loader_of(batch_size=0), "batch_size=0 must be an integer of at least 1"),
        (lambda: loader_of(batch_size=None), "batch_size=None must be"),
        (lambda: loader_of(sampler=range(3), batch_sampler=[[1]], generator=torch.Generator()),
            "sampler is not supported: samples are sharded", "batch_sampler is not supported", "generator is not"),
        (lambda: loader_of(in_order=False), "in_order=False would give the ranks of a replica different batches"),
        (lambda: loader_of(num_workers=-1, seed="1", drop_last="no", num_worker=2), "num_workers=-1 must be an integer",
            "seed='1' must be", "drop_last='no' must be", "num_worker is not"),
    ),
    **table("positions",
        (loaded(None, size=9), f"{POSITION} is of size=9, but this dataloader has 8"),
        (loaded(None, seed=4), f"{POSITION} is of seed=4, but this dataloader has 3"),
        (loaded(None, shuffle=False), f"{POSITION} is of shuffle=False, but this dataloader has True"),
        (loaded(None, batches=1), f"{POSITION} has unknown batches", "must have exactly epoch, samples"),
        (loaded(None, samples=-1), f"{POSITION} has samples=-1", "an integer of at least 0"),
        (loaded(None, epoch="1"), f"{POSITION} has epoch='1'", "an integer of at least 0"),
        (loaded(None, samples=9), f"{POSITION}, sample 9, is beyond its 8 samples"),
        (loaded(None, epoch=None, size=9, seed=4), "has epoch=None", "is of size=9", "is of seed=4"),
        (loaded({"epoch": 1}), "lacks samples, seed, shuffle, size", "it must have exactly"),
        (loaded([]), "must be a state_dict() of a dataloader, not a list"),
        (loaded_by_user(size=21), "size=21, but this dataloader has size=20", "use the same data as the saved"),
        (lambda: sharded().load_state_dict({"epoch": 0, "samples": 4, "seed": 1, "size": 20, "shuffle": True}),
            f"{POSITION} lacks entropy, start"),
    ),
}
# fmt: on


def seen_by(number: int, *asked: Any) -> Callable[[], Any]:
    """Make a choice of a device where torch sees this number of GPUs."""
    kind_seen = torch.device("cuda") if number else None
    return entered(
        patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: kind_seen),
        patch.object(torch.accelerator, "device_count", lambda: number),
    )(partial(chosen, *asked))


def placed_twice(other: Placement) -> Callable[[], Any]:
    def call() -> None:
        parameter = Parameter(torch.zeros(4, 4))
        place(parameter, Shard(size=2, dim=0, blocks=(4,)), 0)
        place(parameter, other, 0)

    return call


# fmt: off
LAYOUTS: dict[str, Row] = {
    **table("devices",
        (seen_by(4, "cuda:4"), "device='cuda:4' is not available", "sees 4 of cuda, numbered from 0"),
        (seen_by(0, "cuda"), "device='cuda' is not available, this process sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (seen_by(4, "cpu", "nccl"), "backend='nccl' needs a CUDA device", "leave out device="),
        (seen_by(0, None, "nccl"), "backend='nccl' needs a CUDA device", "or leave it out"),
        (seen_by(2, None, None, (0, 4)), "4 processes of this machine see 2 GPUs", "start 2 processes, or use backend"),
        (seen_by(2, "cuda", "nccl", (1, 3)), "3 processes of this machine see 2 GPUs"),
    ),
    **table("shards",
        (lambda: Shard(size=2, dim=0, blocks=(5,), padded=(4,)), "padded=(4,) is shorter than blocks=(5,)"),
        (lambda: Shard(size=4, dim=0, blocks=(4, 2, 2, 4), stretches=2), "stretches=2", "blocks=(4, 2, 2, 4) are not"),
        (lambda: Shard(size=2, dim=0, blocks=(2, 2, 2, 2), stretches=4), "stretches=4 does not divide the 2 shards"),
        (lambda: Shard(size=4, dim=0, blocks=(8, 10)), "10 entries along dim 0", "not divisible by 4 ranks"),
        (lambda: Shard(size=4, dim=0, blocks=(12,), replicas=3), "replicas=3 does not divide size=4"),
        (lambda: MeshLayout.of(4, tp=3), "tp_size=3 * pp_size=1"),
        (placed_twice(Shard(size=2, dim=1, blocks=(4,))), "dim 0, and here sharded along dim 1", "give it a copy"),
        (placed_twice(PartialGrad(size=2)), "along dim 0, and here replicated, with partial gradients"),
        (placed_twice(Shard(size=2, dim=0, blocks=(2, 2))), "blocks=(4,), and here", "with blocks=(2, 2)"),
        (lambda: plan_files({"file": [entry("a", 4)]}, [{"a": holding(4, 0, 3)}]), "a has 8 entries", "ranks have 6"),
    ),
    **table("checkpoints to resume from",
        (partial(resumed, "checkpoint-4"), "checkpoint-4' is no complete checkpoint", "or True for the last complete"),
        (partial(resumed, "checkpoint-9"), "checkpoint-9' is no complete checkpoint", "no readable trainer_state.json"),
        (partial(resumed, True), "has no complete checkpoint: leave it out"),
    ),
    **table("dataloaders of Trainer",
        (sharing([[0, 1], [2]]), "batches of a list have no fixed size that replicas could share"),
        (sharing(Bucketed(range(4), 2, False)), "the batches of a Bucketed have no fixed size", "batches have it"),
        (partial(ReplicaAccelerator.of_replica, None, [1], use_seedable_sampler=False),  # type: ignore[arg-type]
            "a list takes the place of Trainer's dataloader", "return a torch.utils.data.DataLoader"),
    ),
    **table("planned models",
        (lambda: load_config("no-such-type"), "--model"),
        (lambda: load_config("lama"), "--model 'lama' is no folder", "or a type as llama"),
        (with_config("{"), "no config that transformers accepts", "not a valid JSON file"),
        (with_config('{"model_type": "new", "auto_map": {"AutoConfig": "a.B"}}'), "its code is not run here: mend it"),
        *(() if ARE_PLANS_OLDER else (  # older releases accept it
            (with_config('{"model_type": "llama", "hidden_size": "big"}'), "transformers accepts", "mend it"),
            (with_config('{"model_type": "llama", "hidden_size": -4}'), "transformers accepts", "hidden size (-4)"))),
        *((partial(planned_with, memory), f"--memory without --reserve is {memory:g} GiB", "the memory of a GPU")
            for memory in (-1.0, math.nan, math.inf)),
        (lambda: raise_errors(ModelChoice(model_type="lama").errors()), "did you mean llama or", "models --all"),
        (lambda: load_config("/"), "--model"),
        (lambda: build_on_meta(load_config("bert"), "nothing"), "masked_lm"),
    ),
}
# fmt: on


def drawn(*shape: int) -> list[Parameter]:
    return [Parameter(torch.ones(shape))]


member = SGD(drawn(2), lr=1.0)
WRONG_SCALE = dict(initial_scale=0.5, growth_factor=1, growth_interval=0, backoff_factor=1, hysteresis=0)
# fmt: off
OPTIMIZERS: dict[str, Row] = {
    **table("combined",
        (lambda: CombinedOptimizer([member]).add_param_group({"params": drawn(2)}), "to a member before combining"),
        (lambda: CombinedOptimizer([]), "no optimizers"),
        (lambda: CombinedOptimizer([CombinedOptimizer([member])]), "a CombinedOptimizer"),
        (lambda: CombinedOptimizer([member, member]), "more than one parameter group"),
    ),
    **table("muon",
        (lambda: Muon(drawn(4)), "no matrix: give it to AdamW"),
        (lambda: Muon(drawn(4, 3), blocks=(2, 1)), "do not add up to dim -2"),
        (lambda: Muon(drawn(4, 3), blocks=(2, 2), transposed=True), "do not add up to dim -1"),
        (lambda: Muon(drawn(4, 3), lr=-1.0), "Learning rate"),
        (lambda: Muon([]), "an empty list"),
    ),
    **table("kinds",
        *((lambda name=name: require_elementwise(kind(name)(matrix(), lr=0.01)), f"{name} is not element-wise", "AdamW")
            for name in ("TrustRatio", "OfLargeMatrices")),
        (lambda: update_kinds(kind("WholeNorm")(matrix(), lr=0.01)), "WholeNorm couples", "TorchDDPPlugin", "AdamW"),
        *((lambda made=made: update_kinds(made(matrix(), lr=0.01)), f"{made.__name__} could not be tried on a matrix")
            for made in (torch.optim.LBFGS, torch.optim.SparseAdam)),
        (lambda: update_kinds(CombinedOptimizer([Unusual(matrix(), lr=0.1, model=None)])),
            "Unusual could not be tried", "'model'"),
    ),
    "a precision": (lambda: PrecisionConfig(precision="fp8", **WRONG_SCALE),
        "precision='fp8' must be one of 'fp32', 'bf16', 'fp16'", *(f"- {name}=" for name in WRONG_SCALE)),
}


def of_deepspeed(number: int = 2, without: tuple[str, ...] = (), **config: Any) -> Callable[[], Any]:
    return partial(deepspeed.plugin_arguments, config, num_replicas=number, without=without)


def of_internevo(config: Any = None, /, **sections: Any) -> Callable[[], Any]:
    return partial(internevo.plugin_arguments, sections if config is None else config)


LAYOUT = {"zero1": {"size": 8, "fsdp": False}, "tensor": {"size": 2, "mode": "isp"}, "weight": {"size": 4}}
BATCHES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
ON, STAGE = {"enabled": True}, "zero_optimization"
MANY: dict[str, Any] = {
    "parallel": {"zero1": {"size": "8", "fsdp": True}, "tensor": {"size": 2, "mode": "msp", "overlap": True},
        "pipeline": {"size": 2, "mode": "gpipe"}, "weight": {"size": 2}, "sequence_parallel": False,
        "sequence_2D": {"enable": True, "head_size": 2}, "expert": {"size": 4}},
    "hybrid_zero_optimizer": {"clip_grad_norm": "1", "overlap_sync_gard": True},
    "model": {"dtype": "torch.tf32", "checkpoint": 2, "embed_grad_scale": 0.1, "num_chunk": 2},
    "data": 4, "grad_scaler": {"fp16": {"growth_factor": 2}}, "loss": {"label_smoothing": 0.1},
    "use_fp32_norm": True, "paralel": {},
}
CONFIGURATIONS: dict[str, Row] = {
    **table("DeepSpeed",
        (of_deepspeed(zero_optimization={"stage": 3}), f"{STAGE}.stage=3 must be 0, 1 or 2", "TorchFSDP"),
        (of_deepspeed(optimizer={"type": "AdamW"}), "optimizer is not read", "build it in the script"),
        (of_deepspeed(zero_optimization={"offload_optimizer": {"device": "nvme"}}), "device='nvme' must be 'cpu' or"),
        (of_deepspeed(bf16=ON, fp16=ON), "both enabled: enable one"),
        (of_deepspeed(fp16={"enabled": True, "loss_scale": 128}), "a constant loss scale"),
        (of_deepspeed(**BATCHES), "train_batch_size=8 is not", "=4 × gradient_accumulation_steps=2 × 2 processes"),
        (of_deepspeed(gradient_cliping=1.0), "gradient_cliping is not understood", "write gradient_clipping"),
        (of_deepspeed(zero_optimization={"zzz": 1}), f"{STAGE}.zzz is not understood", "known are"),
        (of_deepspeed(gradient_clipping="high"), "gradient_clipping='high' must be a number"),
        (of_deepspeed(1, zero_optimization={"stage": 3, "zzz": 1}, gradient_clipping="high", scheduler={}),
            "DeepSpeed's configuration", "stage=3", "zzz", "'high'", "scheduler is not read"),
        (of_deepspeed(1, without=("zero",)), "names no section"),
        (of_deepspeed(1, activation_checkpointing={"profile": True}), "model.gradient_checkpointing_enable()"),
        (of_deepspeed(1, bfloat16=ON), "bfloat16={'enabled': True} is an older name: write bf16"),
        (of_deepspeed(1, bf16={"bf16_master_weights_and_grads": True}), "is not available: weights of 16 bits have"),
        (of_deepspeed(1, pipeline={"stages": 2}), "is not read", "HybridParallelPlugin(pp_size=...)"),
        (of_deepspeed(1, tensor_parallel={"autotp_size": 2}), "is not read", "HybridParallelPlugin(tp_size=...)"),
        (of_deepspeed(1, elasticity=ON), "elasticity={'enabled': True} is not available: leave it out"),
    ),
    **table("InternEvo",
        (of_internevo(MANY), "19 errors", *(f"InternEvo's configuration: {start}" for start in (
            "parallel.zero1.size='8' must be an integer", "parallel.zero1.fsdp=True", "parallel.tensor.overlap is not",
            "parallel.sequence_parallel=False contradicts tensor.mode='msp'", "parallel.weight.size=2 needs tensor=",
            "parallel.pipeline.mode='gpipe' must be", "parallel.sequence_2D.enable=True is", "parallel.expert.size=4",
            "data=4 must be a dict", "hybrid_zero_optimizer.clip_grad_norm='1' must",
            "hybrid_zero_optimizer.overlap_sync_gard is not understood: write overlap_sync_grad",
            "grad_scaler.fp16.growth_factor is not understood", "model.dtype='torch.tf32' is float32",
            "model.checkpoint=2 must", "model.embed_grad_scale=0.1 is not available", "model.num_chunk is not",
            "use_fp32_norm=True", "loss.label_smoothing=0.1", "paralel is not understood: write parallel"))),
        (of_internevo(parallel={}, zero1=8), "zero1 is given twice, also in parallel"),
        (partial(internevo.plugin_arguments, LAYOUT, weight=2), "weight is given twice"),
        (of_internevo(num_chunks=2, model={"num_chunks": 3}), "num_chunks=2 and model.num_chunks=3 differ"),
        (of_internevo(pipeline={"size": 2, "mode": "ZBH1"}, num_chunks=2), "ZBH1 has 1 chunk"),
        (of_internevo(pipeline={"size": 2, "mode": "ZBV"}, num_chunks=3), "ZBV 2"),
        (of_internevo(data={"micro_num": 4, "gradient_accumulation": 2}), "gradient_accumulation=2", "be micro_num=4"),
        (of_internevo(tensor={"mode": "tp"}), "tensor.mode='tp' must be", "'mtp', 'msp', 'fsp', 'isp'"),
        (of_internevo(tensor={"mode": ["isp"]}), "tensor.mode=['isp'] must be a str"),
        (of_internevo(hybrid_zero_optimizer={"overlap_sync_grad": True, "zero_overlap_communication": False}),
            "is the older name of overlap_sync_grad=True"),
        (of_internevo("config.yaml"), "'config.yaml' must end in one of .py"),
        (of_internevo("none.py"), "'none.py' is not a file"),
        (of_internevo(7), "must be a dict or the path of a file, not 7"),
    ),
}
# fmt: on
