"""Pages of docs/: scripts train, pictures agree with the code, and links are valid."""

import importlib.util
import re
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.plugins.internevo import plugin_arguments
from echelon.shardformer.layers.sequence_axis import SequenceOrder
from echelon.shardformer.tables import decoders

from ..pool import Pool
from .scripts import DOCS, ENDING, ROOT, code_blocks, losses, printed, run_script

CHECKPOINTS, ZERO, SEQUENCE = (DOCS / f"{name}.md" for name in ("checkpoints", "zero", "sequence"))
COLOSSALAI, INTERNEVO = (DOCS / f"coming-from-{name}.md" for name in ("colossalai", "internevo"))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda path: path.stem,
)
def test_links_of_a_page_are_valid(path: Path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    targets = [link.partition("#")[0] for link in links] + re.findall(r'<img src="([^"]+)"', text)
    files = re.findall(r"`((?:tests|docs|examples)/[\w/.]*)`", text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert missing + [name for name in files if not (ROOT / name).exists()] == []
    pages = {link: (path.parent / link.partition("#")[0]) if link[0] != "#" else path for link in links}
    anchored = {link: page for link, page in pages.items() if "#" in link and page.suffix == ".md"}
    assert [link for link, page in anchored.items() if link.partition("#")[2] not in anchors(page)] == []


# Scripts.


@pytest.mark.slow
def test_the_design_shows_the_table_of_llama() -> None:
    (shown,) = code_blocks(DOCS / "design.md", "python")
    names = {name: getattr(decoders, name) for name in ("Table", "StagePlan", "RegionDropout")}
    exec(shown, names)
    assert names["LLAMA"] == decoders.LLAMA


@pytest.mark.slow
def test_the_script_of_the_checkpoints_resumes_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    script = code_blocks(CHECKPOINTS, "py")[0]
    commands = re.findall(r"--nproc_per_node (\d) train.py (.*)", CHECKPOINTS.read_text())

    def run(size: str, words: str) -> list[float]:
        return losses(pool.run(int(size), printed, script, tmp_path, *words.split())[0])

    runs = [run(*command) for command in commands]
    assert list(map(len, runs)) == [6, 6]
    alone = losses(pool.run(1, printed, script, tmp_path / "alone", "1", "1", "12")[0])
    assert [*runs[0], *runs[1]] == pytest.approx(alone, abs=2e-6)  # six digits are printed
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-00000009", "step-00000012"]
    assert run(*commands[-1]) == []  # as torchrun restarts a run of which a rank died at its very end


def internevo_file(folder: Path) -> Path:
    path = folder / "config.py"
    path.write_text(code_blocks(INTERNEVO, "py")[0])
    return path


def test_internevos_configuration_becomes_arguments(tmp_path: Path) -> None:
    assert plugin_arguments(internevo_file(tmp_path)) == {
        **dict(tp_size=1, pp_size=1, sp_size=2, wp_size=4, wp_overlap=True, enable_flash_attention=False),
        **dict(enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
        **dict(zero_stage=1, zero_size=-1, num_microbatches=2, precision="fp32"),
        **dict(overlap_communication=True, overlap_allgather=False, zero_bucket_size_in_m=512, max_norm=1.0),
        **dict(initial_scale=2**16, min_scale=1, growth_interval=1000, growth_factor=2, backoff_factor=0.5),
    }


@pytest.mark.slow
def test_the_script_for_internevo_trains_on_four_ranks(tmp_path: Path) -> None:
    internevo_file(tmp_path)
    (script,) = code_blocks(INTERNEVO, "python")
    printed_losses = losses(run_script(script, tmp_path, num_processes=4))
    # 32 samples, two replicas, batches of 4.
    assert len(printed_losses) == 4 and all(map(isfinite, printed_losses))


@pytest.mark.slow
def test_the_script_of_lora_trains_adapters_that_peft_finds(tmp_path: Path) -> None:
    (script,) = code_blocks(DOCS / "lora.md", "python")
    printed_losses = losses(run_script(script + ENDING, tmp_path, num_processes=2))
    assert len(printed_losses) == 10 and printed_losses[-1] < printed_losses[0]
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    shapes = {re.sub(r".*\d\.", "", name): tuple(tensor.shape) for name, tensor in stored.items()}
    assert shapes == {
        f"self_attn.{layer}.lora_{factor}.weight": shape
        for layer in ("q_proj", "v_proj")
        for factor, shape in (("A", (8, 32)), ("B", (32, 8)))
    }


def test_the_script_of_scripts_measures_and_takes_flags(pool: Pool, tmp_path: Path) -> None:
    (script,) = code_blocks(DOCS / "scripts.md", "python")
    first, second = pool.run(2, printed, script, tmp_path, "--tp_size", "2", "--steps", "20")
    assert [line.partition(",")[0] for line in first.splitlines()] == ["step 10/20", "step 20/20"]
    assert second == "" and losses(first)[1] < losses(first)[0]
    assert (tmp_path / "model.safetensors").exists()


def alone_script(mark: str) -> str:
    """Return the script of Shardformer alone from the page for users of ColossalAI."""
    (block,) = [block for block in code_blocks(COLOSSALAI, "py") if mark in block and "echelon" in block]
    return block


def split_shapes() -> list[int]:
    """Return how many of 128 padded entries, of 32 features and of 3072 are on this rank."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(alone_script("shard_model(model, policy)"), names)
    bert = names["model"].bert
    embedding, layer = bert.embeddings.word_embeddings, bert.encoder.layer[0]
    layers = (embedding, layer.attention.self.query, layer.intermediate.dense)
    return [module.weight.shape[0] for module in layers]


@pytest.mark.slow  # the next test is quick
def test_shardformer_alone_shards_over_the_world(pool: Pool) -> None:
    assert pool.run(1, split_shapes) == [[90, 32, 3072]]
    assert pool.run(2, split_shapes) == [[64, 16, 1536]] * 2


def test_shardformer_alone_trains_and_answers_equally_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    source = alone_script("shard_former.shard_dataset(")
    assert source.count("tensor_parallel_size=2") == 1
    one = source.replace("tensor_parallel_size=2", "tensor_parallel_size=1")
    (alone,) = pool.run(1, printed, one, tmp_path)
    assert len(losses(alone)) == 4
    for together in pool.run(2, printed, source, tmp_path):
        assert losses(together) == pytest.approx(losses(alone), abs=1e-4)
        assert re.findall(r"\[.*\]", together) == re.findall(r"\[.*\]", alone)
        assert len(re.findall(r"\d+", together.splitlines()[-1])) == 4


@pytest.mark.slow
def test_scripts_of_shardformer_alone_start_their_process_groups(tmp_path: Path) -> None:
    first, second = alone_script("shard_model(model, policy)"), alone_script("shard_former.shard_dataset(")
    run_script(first + ENDING, tmp_path, num_processes=None)
    run_script(first + ENDING, tmp_path, num_processes=2)
    assert len(losses(run_script(second + ENDING, tmp_path, num_processes=2))) == 8


# Pictures.


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a drawing script of docs/."""
    pytest.importorskip("matplotlib")

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look up the module of their class
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(("local", "is_zigzag"), [("part", False), ("zigzag", True)])
def test_the_pictures_of_sequences_show_the_shards_of_ranks(
    drawing: Callable, local: str, is_zigzag: bool
) -> None:
    pictures = drawing("draw_sequence")
    length = pictures.NUM_STRETCHES
    order = SequenceOrder(size=pictures.NUM_RANKS, is_zigzag=is_zigzag)
    for rank in range(pictures.NUM_RANKS):
        drawn = [
            position
            for patch in getattr(pictures, local)(rank)
            for position in range(round(patch.top * length), round((patch.top + patch.height) * length))
        ]
        assert drawn == order.shard(torch.arange(length), 0, rank).tolist()


def test_the_drawn_ring_computes_every_pair_once_and_equally_many_per_rank(drawing: Callable) -> None:
    pictures = drawing("draw_sequence")
    side = pictures.NUM_STRETCHES
    pairs = [
        [(round(patch.top * side), round(patch.left * side)) for patch in pictures.keys_by_step(rank)]
        for rank in range(pictures.NUM_RANKS)
    ]
    every = sorted(pair for of_rank in pairs for pair in of_rank)
    assert every == [(query, key) for query in range(side) for key in range(query + 1)]
    assert len(set(map(len, pairs))) == 1


def test_the_drawn_rows_arrive_at_their_experts_and_none_is_lost(drawing: Callable) -> None:
    drawing("draw_sequence")
    pictures = drawing("draw_experts")
    pairs = [pictures.pairs(rank) for rank in range(pictures.NUM_RANKS)]
    for rank in range(pictures.NUM_RANKS):
        senders = pictures.arrived(rank)
        sent = [destinations.count(rank) for destinations in pairs]
        assert [senders.count(sender) for sender in range(pictures.NUM_RANKS)] == sent
    drawn = pictures.PANELS[2].holds
    assert sum(len(drawn(rank)) for rank in range(pictures.NUM_RANKS)) == sum(map(len, pairs))
    texts = "\n".join(f"{panel.title}\n{panel.sent}" for panel in pictures.PANELS)
    require_written("experts.svg", texts.splitlines())
    assert "images/experts.svg" in (DOCS / "experts.md").read_text()


def test_pictures_are_up_to_date_and_agree_with_the_tables(drawing: Callable) -> None:
    for name, panels in drawing("draw_sequence").PICTURES.items():
        texts = [panel.title for panel in panels] + [
            line for panel in panels for line in panel.sent.splitlines()
        ]
        require_written(f"sequence_{name}.svg", texts)
        assert f"images/sequence_{name}.svg" in SEQUENCE.read_text()
    zero = drawing("draw_zero")
    texts = [*zero.PHASES, *zero.KINDS]
    for stage in zero.STAGES:  # the bytes of a parameter: "6 Ψ + 12 Ψ/d" is 6 + 12 / d
        terms = re.findall(r"(\d+) Ψ(/d)?", stage.formula)
        assert stage.bytes_held == sum(
            int(number) / (zero.NUM_RANKS if sharded else 1) for number, sharded in terms
        )
        texts += [stage.formula, f"= {stage.bytes_held:g} Ψ", *stage.traffic]
    require_written("zero.svg", texts)
    rows = re.findall(r"^\| (stage \d) \| [^|]* \| ([^|]*?)( \+ buckets)? \|$", ZERO.read_text(), flags=re.M)
    formulas = [(stage.name, stage.formula) for stage in zero.STAGES if stage.name != "FSDP"]
    assert [(name, formula) for name, formula, _ in rows[:3]] == formulas  # another table is for cpu_offload


def require_written(picture: str, texts: list[str]) -> None:
    written = (DOCS / "images" / picture).read_text()
    assert [text for text in texts if text not in written] == [], picture
