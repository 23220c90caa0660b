"""One run of a Trainer: on one process by transformers' own, or under a layout by Echelon's, on workers of the pool."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCAB, LENGTH = 64, 12
# Arguments of a run on CPUs that reports nothing.
QUIET: dict[str, Any] = dict(use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False)
WORDS = [f"w{i}" for i in range(61)]
_SKIPPED = ("runtime", "per_second", "preparation_time")  # times


@dataclass(frozen=True)
class Run:
    """What one run is asked to do.

    Args:
        folder: of its checkpoints.
        arguments: of TrainingArguments.
        kind: a name of `KINDS`.
        resume: the checkpoint to resume from; True for the last one.
        evaluates_first: evaluate before training.
        predicts: predict at the end.
        early_stopping: stop at the first evaluation that is not better.
    """

    folder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "causal"
    resume: str | bool | None = None
    evaluates_first: bool = False
    predicts: bool = False
    early_stopping: bool = False


def texts(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts of one length, of which different numbers of tokens count."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        length = int(torch.randint(4, LENGTH, (), generator=draw))
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=draw)
        is_text = torch.arange(LENGTH) < length
        labels = ids.where(is_text, -100)
        rows.append(dict(input_ids=ids, labels=labels, attention_mask=is_text.long(), length=length))
    return rows


def inputs(row: dict[str, Any]) -> dict[str, Any]:
    return dict(input_ids=row["input_ids"], attention_mask=row["attention_mask"])


def classified(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts with a class each."""
    return [inputs(row) | dict(labels=int(row["input_ids"].sum() % 3)) for row in texts(number, seed)]


def measured(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts with a number each."""
    return [row | dict(labels=float(row["input_ids"].sum() % 7) / 7) for row in classified(number, seed)]


def renamed(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts with a class each, under a name that Trainer does not know."""
    return [
        {"classes" if name == "labels" else name: value for name, value in row.items()}
        for row in classified(number, seed)
    ]


def answered(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts with the positions of an answer each."""
    rows = []
    for row in texts(number, seed):
        start, end = (int(token) % LENGTH for token in row["input_ids"][:2])
        rows.append(inputs(row) | dict(start_positions=start, end_positions=end))
    return rows


def unlabelled(number: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts without labels."""
    return [
        dict(input_ids=row["input_ids"], attention_mask=torch.ones(LENGTH).long())
        for row in texts(number, seed)
    ]


def full_batches(rows: list[Any]) -> list[Any]:
    """Return the rows that fill batches of 8."""
    return rows[: len(rows) // 8 * 8]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def masks(samples: list[Any]) -> Any:
    """A collator that masks tokens at random."""
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    words.mask_token = "<unk>"
    return DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.3)(samples)


class Stream(IterableDataset[Any]):
    """A stream of samples."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    routing = dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.05)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=4, **routing))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    routing = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    routing |= dict(output_router_logits=True, router_aux_loss_coef=0.05)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=8, **routing))


def bert(head: Any = BertForSequenceClassification, labels: int = 3) -> Any:
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return head(BertConfig(**SIZES, **dropout, **({"num_labels": labels} if "Seq" in head.__name__ else {})))


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def accuracy(prediction: Any) -> dict[str, float]:
    """Return how many tokens, or samples, are predicted, and how many there are."""
    logits, labels = prediction.predictions, prediction.label_ids
    if isinstance(logits, tuple):  # with what routers chose
        logits = logits[0]
    if logits.ndim == 3:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != -100
    return {
        "accuracy": float(((logits.argmax(-1) == labels) & counted).sum() / counted.sum()),
        "rows": len(labels),
    }


def accuracy_of_inputs(prediction: Any) -> dict[str, float]:
    """Return the accuracy, and numbers of the inputs and losses that a metric gets."""
    inputs, losses = prediction.inputs, prediction.losses
    return {**accuracy(prediction), "inputs": float(inputs.sum()), "losses": float(losses.mean())}


class AccuracyByBatch:
    """A metric of `batch_eval_metrics`: the accuracy, and the numbers of tokens and batches."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, int]] = []

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        """Count a batch; return the result behind the last one."""
        labels = prediction.label_ids[:, 1:]
        hits = (prediction.predictions[:, :-1].argmax(-1) == labels) & (labels != -100)
        self._batches.append((int(hits.sum()), int((labels != -100).sum())))
        if not compute_result:
            return {}
        batches, self._batches = self._batches, []
        num_hits, num_tokens = (sum(counts) for counts in zip(*batches, strict=True))
        return {"accuracy": num_hits / num_tokens, "tokens": num_tokens, "batches": len(batches)}


def exact_answers(prediction: Any) -> dict[str, float]:
    """Return how many answers are exact."""
    hits = [p.argmax(-1) == y for p, y in zip(prediction.predictions, prediction.label_ids, strict=True)]
    return {"exact": float((hits[0] & hits[1]).mean()), "starts": float(hits[0].mean()), "rows": len(hits[0])}


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func`: the sum over the number of items, as Trainer asks for."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def weighted_mean(trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """A subclass's `compute_loss`: a mean by class weights, which knows nothing of other microbatches."""
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))(outputs.logits, labels)
    return (loss, outputs) if return_outputs else loss


def loss_of_classes(trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """A subclass's `compute_loss` whose labels Trainer does not know."""
    classes = inputs.pop("classes")
    outputs = model(**inputs)
    loss = torch.nn.functional.cross_entropy(outputs.logits, classes)
    return (loss, outputs) if return_outputs else loss


def with_penalty(
    trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """A subclass's `compute_loss` that adds a mean to Trainer's loss, which is a sum over the number of items."""
    loss, outputs = super(type(trainer), trainer).compute_loss(
        model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
    )
    assert loss.item() >= 0  # as a log of it
    loss = 2 * loss + 0.5 * outputs.logits.pow(2).mean()
    return (loss, outputs) if return_outputs else loss


def penalized_sum(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func` that adds a mean to a sum over the number of items."""
    return summed_loss(outputs, labels, num_items_in_batch) + 0.5 * outputs["logits"].pow(2).mean()


def plain_dataloader(trainer: Any, **_: Any) -> Any:
    """A subclass's `get_train_dataloader` without accelerate, of other samples than the data set has."""
    from torch.utils.data import DataLoader, SubsetRandomSampler

    sampler = SubsetRandomSampler(range(21), torch.Generator().manual_seed(3))
    return DataLoader(
        trainer.train_dataset, trainer._train_batch_size, sampler=sampler, collate_fn=trainer.data_collator
    )


def squares(prediction: Any) -> dict[str, float]:
    """Return the mean squared error, and the number of samples."""
    error = prediction.predictions.squeeze(-1) - prediction.label_ids
    return {"error": float((error**2).mean()), "rows": len(error)}


@dataclass(frozen=True)
class Kind:
    """Model, data, loss and metrics of a run, with further methods of the trainer."""

    model: Callable[[], Any] = llama
    rows: Callable[[int, int], list[Any]] = texts
    wrapped: Callable[[list[Any]], Any] = list
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Any] = field(default_factory=dict)
    metrics: Callable[..., Any] | None = accuracy


KINDS = {
    "causal": Kind(),
    "adapters": Kind(model=adapted),
    "experts": Kind(model=mixtral, wrapped=full_batches),
    "qwen3_moe": Kind(model=qwen3_moe, wrapped=full_batches),
    "answers": Kind(model=partial(bert, BertForQuestionAnswering), rows=answered, metrics=exact_answers),
    "masks": Kind(
        model=partial(bert, BertForMaskedLM), rows=unlabelled, trainer_arguments={"data_collator": masks}
    ),
    "model_init": Kind(model=lambda: None, trainer_arguments={"model_init": llama}),
    "metrics of inputs": Kind(metrics=accuracy_of_inputs),
    "metrics by batch": Kind(metrics=AccuracyByBatch()),
    "without metrics": Kind(metrics=None),
    "stream": Kind(wrapped=Stream),
    "bert": Kind(model=bert, rows=classified),
    "numbers": Kind(model=partial(bert, labels=1), rows=measured, metrics=squares),
    "stream of numbers": Kind(model=partial(bert, labels=1), rows=measured, wrapped=Stream, metrics=squares),
    "other labels": Kind(
        model=bert,
        rows=renamed,
        methods={"compute_loss": loss_of_classes, "loss_is_scaled_for_ga": False},
        metrics=None,
    ),
    "penalty": Kind(methods={"compute_loss": with_penalty}),
    "penalized loss function": Kind(trainer_arguments={"compute_loss_func": penalized_sum}),
    "plain dataloader": Kind(methods={"get_train_dataloader": plain_dataloader}),
    "loss function": Kind(trainer_arguments={"compute_loss_func": summed_loss}),
    "compute_loss": Kind(
        model=bert, rows=classified, methods={"compute_loss": weighted_mean, "loss_is_scaled_for_ga": False}
    ),
}


def set_environment(plugin: Mapping[str, Any] | None) -> None:
    """Without a plugin, leave the process group to which the launcher's variables lead."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if plugin is None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def trained(run: Run, plugin: Mapping[str, Any] | None, dp: int = 1) -> dict[str, Any] | None:
    """Train, on one process without `plugin`; return the numbers of the run on the first rank."""
    set_environment(plugin)
    import transformers

    from echelon.trainer import EchelonTrainerMixin

    kind = KINDS[run.kind]
    mixins = () if plugin is None else (EchelonTrainerMixin,)
    trainer_class: Any = type("Tried", (*mixins, transformers.Trainer), {})
    trainer_class = type("Native", (trainer_class,), dict(kind.methods))  # as a script derives its own
    torch.manual_seed(0)
    sizes = dict(per_device_train_batch_size=8 // dp, per_device_eval_batch_size=8 // dp)
    usual = dict(num_train_epochs=2, logging_steps=1, eval_strategy="epoch", save_strategy="no")
    args = transformers.TrainingArguments(run.folder, **{**QUIET, **sizes, **usual, **run.arguments})
    trainer = trainer_class(
        kind.model(),
        args,
        train_dataset=kind.wrapped(kind.rows(43, 1)),
        eval_dataset=kind.wrapped(kind.rows(13, 2)),
        compute_metrics=kind.metrics,
        **kind.trainer_arguments,
        **({} if plugin is None else {"plugin": dict(plugin)}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if run.early_stopping:
        trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=1))
    return result(trainer, run)


def result(trainer: Any, run: Run) -> dict[str, Any] | None:
    """Train, save, and return the numbers on the first rank."""
    if run.evaluates_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=run.resume)
    predicted = trainer.predict(trainer.eval_dataset) if run.predicts else None
    final = Path(run.folder) / "final"
    trainer.save_model(str(final))
    if dist.is_initialized():
        dist.barrier()
    if not trainer.is_world_process_zero():
        return None
    best = trainer.state.best_model_checkpoint
    return {
        "history": [without_times(entry) for entry in trainer.state.log_history],
        "weights": weights(final),
        "best": None if best is None else (Path(best).name, trainer.state.best_metric),
        "steps": sorted(path.name for path in Path(run.folder).glob("checkpoint-*")),
        "files": sorted(path.name for path in final.iterdir() if path.name != "README.md"),  # peft's card
        "predicted": None if predicted is None else (predicted.predictions, without_times(predicted.metrics)),
    }


def weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights that `from_pretrained` finds in a folder, or the adapters, in float32."""
    import transformers
    from safetensors.torch import load_file

    if (folder / "adapter_config.json").exists():
        return load_file(folder / "adapter_model.safetensors")
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).state_dict()


def without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if not any(word in k for word in _SKIPPED)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], *, tolerance: float) -> list[str]:
    """List the numbers of two runs that differ by more than a relative tolerance."""
    differing = [
        f"{name} is {other[name]!r} instead of {one[name]!r}"
        for name in ("steps", "files")
        if name in one and one[name] != other[name]
    ]
    if len(one["history"]) != len(other["history"]):
        return [*differing, f"{len(other['history'])} log entries instead of {len(one['history'])}"]
    pairs = [
        (f"{name} of entry {index}", a[name], b.get(name))
        for index, (a, b) in enumerate(zip(one["history"], other["history"], strict=True))
        for name in a
    ]
    pairs += [(name, one["weights"][name], other["weights"].get(name)) for name in one["weights"]]
    if one.get("best") and one["best"][0] != other["best"][0]:
        differing.append(f"best is {other['best']} instead of {one['best']}")
    if one.get("predicted"):
        pairs += [("predictions", one["predicted"][0], other["predicted"][0])]
    return differing + [
        f"{name}: {a if np.size(a) == 1 else ''} {b if np.size(b) == 1 else ''}"
        for name, a, b in pairs
        if b is None or not np.allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)
    ]
