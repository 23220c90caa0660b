"""The calls of Shardformer alone, as they are printed in the page for those who come from ColossalAI."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from ..pool import Pool
from ..test_readme import code_blocks, run_script

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-colossalai.md"


def script(mark: str) -> str:
    (found,) = [block for block in code_blocks(PAGE, "py") if mark in block and "echelon" in block]
    return found


def losses(printed: str) -> list[float]:
    """Processes that print at once may run into one line."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d{4})", printed)]


def printed(source: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(source, {"__name__": "script"})
    return out.getvalue()


def split_shapes() -> list[int]:
    """How many of 128 padded entries, of 32 features and of 3072 this rank has."""
    names: dict = {"__name__": "script"}
    exec(script("shard_model(model, policy)"), names)
    layer = names["model"].bert.encoder.layer[0]
    tensors = (
        names["model"].bert.embeddings.word_embeddings,
        layer.attention.self.query,
        layer.intermediate.dense,
    )
    return [each.weight.shape[0] for each in tensors]


def test_the_first_script_splits_over_the_world(pool: Pool) -> None:
    assert pool.run(1, split_shapes) == [[90, 32, 3072]]
    assert pool.run(2, split_shapes) == [[64, 16, 1536]] * 2


def test_the_second_script_trains_and_answers_on_two_ranks_as_on_one(pool: Pool) -> None:
    source = script("shard_former.shard_dataset(")
    assert source.count("tensor_parallel_size=2") == 1
    (alone,) = pool.run(1, printed, source.replace("tensor_parallel_size=2", "tensor_parallel_size=1"))
    assert len(losses(alone)) == 4
    for together in pool.run(2, printed, source):
        assert losses(together) == pytest.approx(losses(alone), abs=1e-4)
        assert re.findall(r"\[.*\]", together) == re.findall(r"\[.*\]", alone)
        assert len(re.findall(r"\d+", together.splitlines()[-1])) == 4


@pytest.mark.slow
def test_the_scripts_start_their_process_groups_themselves(tmp_path: Path) -> None:
    first, second = script("shard_model(model, policy)"), script("shard_former.shard_dataset(")
    ending = "\nfrom echelon import DistCoordinator\n\nDistCoordinator().destroy()\n"
    run_script(first + ending, tmp_path, num_processes=None)
    run_script(first + ending, tmp_path, num_processes=2)
    assert len(losses(run_script(second + ending, tmp_path, num_processes=2))) == 8
