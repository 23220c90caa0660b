r"""Train a small causal model that Shardformer alone has sharded: a plain loop, without a booster.

    python examples/shardformer/finetune.py
    torchrun --standalone --nproc_per_node 4 examples/shardformer/finetune.py --tp_size 2 --target_accuracy 0.9

It learns to encrypt generated words by a Caesar cipher, and answers by `generate()` at the end.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import data
from echelon import DistCoordinator, ParallelMesh, ShardConfig, ShardFormer, clip_grad_norm_
from echelon.plugins.state import SplitCheckpoints

sys.path.append(str(Path(__file__).parents[1]))  # modules that all examples share
import metrics
from command_line import FirstRankParser, range_errors, refuse
from saving import Keeper, Saving, add_saving_options, resumed_records, saving_errors
from training import endless, progress_bar, start

NUM_WORDS, NUM_TEST_WORDS = 20000, 500
MODEL_TYPES = ("llama", "qwen3", "mistral")
LOWEST = dict.fromkeys(("tp_size", "key_value_heads", "length", "steps", "batch_size"), 1)


def parse_arguments() -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_type", choices=MODEL_TYPES, default="llama")
    add("--tp_size", type=int, help="ranks that shard each layer; default: all. Others are replicas")
    add("--key_value_heads", type=int, default=1, help="1, 2 or 4; replicated if fewer than --tp_size")
    add("--length", type=int, default=6, help="letters of a word")
    add("--steps", type=int, default=150)
    add("--batch_size", type=int, default=64, help="global batch size in words, over all processes")
    add("--lr", type=float, default=3e-3, help="initial learning rate; decays linearly to 0")
    add("--max_norm", type=float, default=1.0, help="maximum gradient norm")
    add("--target_accuracy", type=float, help="exit with status 1 below this accuracy")
    add("--seed", type=int, default=42)
    add(
        "--metrics",
        "--log_losses",
        type=Path,
        metavar="FILE.jsonl",
        help="loss and gradient norm of each step",
    )
    add_saving_options(parser)
    return parser.parse_args()


def argument_errors(arguments: argparse.Namespace, world_size: int) -> list[str]:
    """Return all errors of the arguments."""
    if found := range_errors(arguments, LOWEST, {}):
        return found
    found += metrics.file_errors(arguments.metrics) + saving_errors(arguments)
    if world_size % arguments.tp_size:
        found.append(f"--tp_size {arguments.tp_size} does not divide the {world_size} processes")
    elif arguments.batch_size % (world_size // arguments.tp_size):
        num_replicas = world_size // arguments.tp_size
        found.append(f"--batch_size {arguments.batch_size} does not divide by {num_replicas} replicas")
    if 4 % arguments.key_value_heads:
        found.append(f"--key_value_heads {arguments.key_value_heads} does not divide 4 heads: use 1, 2 or 4")
    if len(data.LETTERS) ** arguments.length < 2 * NUM_WORDS:
        found.append(f"--length {arguments.length} makes too few words: use at least 4")
    return found


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """Make a small model with random weights, equal on every rank."""
    torch.manual_seed(arguments.seed)
    config = AutoConfig.for_model(
        arguments.model_type,
        vocab_size=data.VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=arguments.key_value_heads,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=4 * arguments.length,
        bos_token_id=None,
        eos_token_id=data.END,
        pad_token_id=data.END,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def train(arguments: argparse.Namespace, model: nn.Module, loader: DataLoader, mesh: ParallelMesh) -> float:
    """Take all remaining steps, export the model and return the last loss. Collective over the world.

    The first rank shows a progress bar and writes the metrics.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=arguments.steps)
    checkpoints, saving = SplitCheckpoints(model, optimizer, mesh), Saving.of(arguments)
    parts = {"lr_scheduler": scheduler, "dataloader": loader}
    records = resumed_records(partial(checkpoints.load_checkpoint, **parts), saving, arguments.steps)
    batches, save = endless(loader), partial(checkpoints.save_checkpoint, **parts)
    lines = metrics.JsonLines(arguments.metrics if dist.get_rank() == 0 else None, records)
    began, done = time.monotonic(), len(records)
    with lines, Keeper(save, saving, arguments.steps) as keeper:
        for step in (bar := progress_bar(done, arguments.steps)):
            batch = {name: tensor.to(mesh.device) for name, tensor in next(batches).items()}
            loss = model(**batch).loss
            loss.backward()  # sums partial gradients over the tensor axis and averages over the data axis
            norm = clip_grad_norm_(model, arguments.max_norm).item()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            records.append({"loss": mean_over_replicas(loss.detach(), mesh), "norm": norm})
            lines.write(records[-1])
            speed = arguments.batch_size * (step - done) / (time.monotonic() - began)
            text = f"loss {records[-1]['loss']:.4f}, gradient norm {norm:.3f}, {speed:.0f} words/s"
            bar.set_postfix_str(text)
            keeper.after_step(records)
    if arguments.save_model is not None:
        checkpoints.save_model(arguments.save_model)
    keeper.require_saved()
    return records[-1]["loss"]


def mean_over_replicas(loss: Tensor, mesh: ParallelMesh) -> float:
    """Average a local loss over the replicas. All-reduce over the data axis."""
    dist.all_reduce(loss, group=mesh.group("dp"))
    return loss.item() / mesh.size("dp")


@torch.no_grad()
def evaluate(model: Any, words: Tensor, mesh: ParallelMesh) -> tuple[float, Tensor]:
    """Generate answers, each replica for its shard of the words. Collective over the world.

    Returns:
        The fraction of correct answers, over all replicas, and this replica's answers.
    """
    model.eval()
    local = words[mesh.rank("dp") :: mesh.size("dp")]
    asked = data.prompts(local).to(mesh.device)
    generated = model.generate(
        asked, attention_mask=torch.ones_like(asked), max_new_tokens=local.shape[1], do_sample=False
    )
    answered = generated[:, asked.shape[1] :].cpu()
    padded = nn.functional.pad(answered, (0, local.shape[1] - answered.shape[1]), value=data.END)
    right = (padded == data.answers(local)).all(-1).sum().to(mesh.device)
    dist.all_reduce(right, group=mesh.group("dp"))
    return right.item() / len(words), padded


def finetune(arguments: argparse.Namespace) -> int:
    """Shard the model, train it and evaluate its answers. Collective over the world.

    Returns:
        The exit status: 0, or 1 if the target is missed.

    Raises:
        Refused: the arguments are invalid, or the model does not fit them; all errors were reported.
    """
    began, coordinator = time.monotonic(), DistCoordinator()
    arguments.tp_size = coordinator.world_size if arguments.tp_size is None else arguments.tp_size
    refuse(argument_errors(arguments, coordinator.world_size))
    mesh = ParallelMesh(tp=arguments.tp_size)
    shard_former = ShardFormer(
        ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"),
            data_parallel_process_group=mesh.group("dp"),
            gather_output=True,
        )
    )
    try:
        model, _ = shard_former.optimize(make_model(arguments).to(mesh.device))
    except ValueError as error:
        refuse(error.args)
        raise
    words = data.words(NUM_WORDS + NUM_TEST_WORDS, length=arguments.length, seed=arguments.seed)
    loader = shard_former.shard_dataset(
        data.samples(words[NUM_TEST_WORDS:]),  # type: ignore[arg-type]
        batch_size=arguments.batch_size // mesh.size("dp"),
        shuffle=True,
        seed=arguments.seed,
        drop_last=True,
    )
    loss = train(arguments, model, loader, mesh)
    accuracy, answered = evaluate(model, words[:NUM_TEST_WORDS], mesh)
    coordinator.print_on_master(f"{data.spelled(words[0])} -> {data.spelled(answered[0])}")
    missed = arguments.target_accuracy is not None and accuracy < arguments.target_accuracy
    if missed:
        text = f"accuracy {accuracy:.4f} is below the target {arguments.target_accuracy}"
        coordinator.print_on_master(text)
    seconds = time.monotonic() - began
    coordinator.print_on_master(f"accuracy={accuracy:.4f} loss={loss:.4f} seconds={seconds:.1f}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(start(finetune, parse_arguments()))
