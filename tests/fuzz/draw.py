"""Random runs: a model, how it is trained, and the layouts that train its two halves. Drawn from a seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from echelon.verify.model_choice import ModelChoice

MOST_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type as it is drawn.

    Args:
        settings: of its config, beside those of a small model.
        choices: further settings, of which one value each is drawn.
        num_layers: of a stack.
        data: the kind of its batches.
        is_spread: attention goes through transformers' interface, so sp_size is drawn too.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, list[Any]] = field(default_factory=dict)
    num_layers: int = 4
    data: Literal["causal", "masked", "seq2seq", "images"] = "causal"
    is_spread: bool = True


_TIED: dict[str, list[Any]] = {"tied": [False, True]}
_GROUPED: dict[str, list[Any]] = {"num_key_value_heads": [1, 2, 4], **_TIED}
_ATTENTION: dict[str, list[Any]] = {"attn_implementation": ["sdpa", "eager"]}

FAMILIES = {
    "llama": Family(choices={**_GROUPED, **_ATTENTION, "attention_bias": [False, True]}),
    "mistral": Family(choices={**_GROUPED, **_ATTENTION, "sliding_window": [None, 5]}),
    "qwen3": Family(choices={**_GROUPED, **_ATTENTION}),
    # Eager attention by default, since it has a soft cap.
    "gemma2": Family(settings=dict(query_pre_attn_scalar=8, sliding_window=5), choices=_GROUPED),
    "gpt2": Family(choices={**_TIED, **_ATTENTION}),
    "bloom": Family(choices=_TIED, is_spread=False),
    "bert": Family(choices={**_TIED, **_ATTENTION}, data="masked"),
    "t5": Family(
        settings=dict(feed_forward_proj="gated-gelu"),
        choices=_TIED,
        num_layers=2,
        data="seq2seq",
        is_spread=False,
    ),
    "vit": Family(choices=_ATTENTION, data="images", is_spread=False),
}

# Large epsilons: a gradient that is zero but for rounding must not become a step of the learning rate.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": dict(lr=1e-2, eps=1e-3, weight_decay=0.1),
    "Adam": dict(lr=1e-2, eps=1e-3, amsgrad=True),
    "SGD": dict(lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": dict(lr=1e-2, eps=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One half of a run: so many processes under a plugin with these arguments."""

    world_size: int
    arguments: dict[str, Any]
    recomputed: float = 0.0  # share of layers that are recomputed in backward

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a replica's batch."""
        return int(self.arguments["num_microbatches"])

    @property
    def num_calls(self) -> int:
        """Calls of `execute_pipeline` in a step, which share its samples."""
        return int(self.arguments.get("gradient_accumulation_steps", 1))

    @property
    def num_replicas(self) -> int:
        """Ranks of the data axis."""
        used = [self.arguments.get(name, 1) for name in ("tp_size", "pp_size", "sp_size")]
        return self.world_size // (used[0] * used[1] * used[2])


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One run. Its `repr` is Python that makes it again.

    Args:
        family: key of FAMILIES.
        settings: of its config, beside the family's own.
        optimizer: key of OPTIMIZERS.
        criterion: the model's own loss, averaged over microbatches, or a sum over tokens with its weight.
        samples: of each step, over all replicas.
        length: tokens of a sample.
        texts: whole, padded on a side, or several in a row by restarting positions.
        frozen: the embedding is not trained.
        is_lazy: the model is built in a `LazyInitContext`.
        halves: two layouts; the second goes on from the first one's checkpoint.
        seed: of weights and batches.
    """

    family: str
    settings: dict[str, Any]
    optimizer: str
    criterion: Literal["model", "tokens"]
    samples: int
    length: int
    texts: Literal["whole", "right", "left", "packed"]
    frozen: bool
    is_lazy: bool
    halves: tuple[Layout, Layout]
    seed: int

    def build(self, seed: int) -> nn.Module:
        """Its model, in training mode."""
        family, settings = FAMILIES[self.family], dict(self.settings)
        tied, head = settings.pop("tied", False), "masked" if self.family == "bert" else None
        choice = ModelChoice(
            model_type=self.family,
            head=head,
            tied=tied,
            num_layers=family.num_layers,
            settings=(*family.settings.items(), *settings.items()),
        )
        model: Any = choice.build(seed)
        if self.frozen:
            model.get_input_embeddings().requires_grad_(False)
        return model


def draw(seed: int, number: int) -> Draw:
    """Return the draw with this number, counted from 0, of a seed."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(list(FAMILIES))
    family = FAMILIES[name]
    texts = chance.choice(("whole", "right", "left", "packed"))
    if texts == "packed" and (family.data != "causal" or name == "bloom"):  # they take no position_ids
        texts = "whole"
    samples = chance.choice((8, 12, 13))
    halves = tuple(_layout(chance, family, samples) for _ in range(2))
    return Draw(
        family=name,
        settings={key: chance.choice(values) for key, values in family.choices.items()},
        optimizer=chance.choice(list(OPTIMIZERS)),
        criterion="model" if family.data == "images" else chance.choice(("model", "tokens")),
        samples=samples,
        length=chance.choice((12, 13, 16)),
        texts=texts,  # type: ignore[arg-type]  # mypy sees str
        frozen=chance.random() < 0.15 and family.data != "images",
        is_lazy=chance.random() < 0.3,
        halves=halves,  # type: ignore[arg-type]  # two of them
        seed=chance.randrange(1000),
    )


def _layout(chance: random.Random, family: Family, samples: int) -> Layout:
    """A layout that the documentation allows for the family."""
    world_size = chance.choice((2, 4, 4))
    sizes = chance.choice([sizes for sizes in _factors(world_size) if family.is_spread or sizes[2] == 1])
    tp, pp, sp, dp = sizes
    if samples % dp:  # replicas get equally many
        return _layout(chance, family, samples)
    arguments: dict[str, Any] = dict(tp_size=tp, pp_size=pp)
    if samples % (2 * dp) == 0 and samples // (2 * dp) >= pp and chance.random() < 0.25:
        arguments["gradient_accumulation_steps"] = 2
    of_a_call = samples // (dp * arguments.get("gradient_accumulation_steps", 1))
    arguments["num_microbatches"] = chance.randint(pp, max(pp, min(4, of_a_call)))
    arguments |= _sequence(chance, tp=tp, sp=sp, family=family) | _pipeline(chance, pp)
    arguments["zero_stage"] = chance.choice((0, 1, 2))
    if arguments["zero_stage"] and dp * sp == 4:
        arguments["zero_size"] = chance.choice((-1, 2))
    if arguments["zero_stage"]:
        arguments["overlap_allgather"] = chance.random() < 0.3
    arguments["overlap_communication"] = chance.random() < 0.7
    arguments["max_norm"] = chance.choice((0.0, 0.5))
    arguments["zero_bucket_size_in_m"] = chance.choice((0.001, 12))
    arguments["cpu_offload"] = chance.random() < 0.2
    arguments["enable_fused_normalization"] = chance.random() < 0.2
    recomputed = chance.choice((0.0, 0.0, 0.5, 1.0))
    return Layout(world_size=world_size, arguments=arguments, recomputed=recomputed)


def _factors(world_size: int) -> Sequence[tuple[int, int, int, int]]:
    """All sizes of tp, pp, sp and dp in such a world."""
    sizes = (1, 2, 4)
    return [
        (tp, pp, sp, world_size // (tp * pp * sp))
        for tp in sizes
        for pp in sizes
        for sp in sizes
        if tp * pp * sp <= world_size
    ]


def _sequence(chance: random.Random, *, tp: int, sp: int, family: Family) -> dict[str, Any]:
    if sp > 1:
        mode = chance.choice(("all_to_all", "ring_attn"))
        return dict(sp_size=sp, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    if tp > 1 and family.data != "images" and chance.random() < 0.4:
        mode = chance.choice(("split_gather", "ring"))
        return dict(enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    return {}


def _pipeline(chance: random.Random, pp: int) -> dict[str, Any]:
    if pp == 1:
        return {}
    if pp == 2 and chance.random() < 0.4:  # four layers have room for two stages on each of two ranks
        return dict(pp_style=chance.choice(("interleaved", "zbv")), num_model_chunks=2)
    return dict(pp_style=chance.choice(("1f1b", "gpipe", "zbh1")))
