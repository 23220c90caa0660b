"""`echelon verify`: exit status, table and refusals."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from echelon.cli import verify as command
from echelon.cli.local_processes import run_on_processes
from echelon.plugins.hybrid_config import HybridConfig
from echelon.verify.compare import Measure, StepComparison
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.resume import Handover, Leg, Relay, ResumeReport
from echelon.verify.routing import Routing

from ..pool import Pool
from .calls import call, cells, require_refused


def report(distance: float) -> ResumeReport:
    measures = tuple(
        Measure(quantity=quantity, name=name, distance=distance, allowed=1.0)
        for quantity, name in (("loss", ""), ("gradient", "a.weight"), ("norm", ""), ("weight", "b.weight"))
    )
    step = StepComparison(step=1, loss=2.0, reference_loss=2.0, measures=measures)
    departure = None if distance <= 1 else f"step 1: {measures[1]}"
    return ResumeReport(steps=(step,), departure=departure, handovers=())


def work_of_rank(work: Any, arguments: Any) -> Any:
    return work(dist.get_rank(), *arguments)


@pytest.mark.parametrize("where", ["pool", pytest.param("new processes", marks=pytest.mark.slow)])
def test_a_layout_on_local_processes_agrees_and_says_so(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "pool":

        def run(work: Any, arguments: Any, *, num_processes: int, timeout_seconds: float) -> list[Any]:
            return pool.run(num_processes, work_of_rank, work, arguments, timeout=timeout_seconds)

        monkeypatch.setattr("echelon.cli.local_processes.run_on_processes", run)
    status, output = call("verify --model bert --tp 2 --steps 1 --layers 1")
    assert (status, "all agree" in output) == (0, True), output
    assert "bert (classification) under tp2·fp32 beside one process" in output


def test_a_departure_is_named_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_relay", lambda *_, **__: report(3.0))
    status, output = call("verify --tp 2")
    assert status == 1
    assert "departs: step 1: gradient of a.weight is off by 3, allowed 1" in output


def test_flips_of_routers_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = replace(report(3.0), routing=Routing(num_tokens=720, num_flipped=10))
    monkeypatch.setattr(command, "run_relay", lambda *_, **__: flipped)
    _, output = call("verify --tp 2")
    assert "10 of 720 tokens, over all mixture layers, have other experts than in one process" in output


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_in_new_processes() -> None:
    status, output = call(
        "verify --model llama --layers 2 --tp 2 --zero 1 --steps 1 --then '--pp 2 --zero 0'"
    )
    assert (status, "all agree" in output) == (0, True), output
    assert "under tp2·zero1·fp32, then pp2·fp32, beside one process" in output
    assert "after step 1: 84 tensors of weights and states loaded bit for bit" in output
    assert [row[0] for row in cells(output)][::2] == ["1", "2"]


def relay_of(monkeypatch: pytest.MonkeyPatch, arguments: str) -> Relay:
    """Return the requested run, without starting it."""
    relays: list[Relay] = []

    def take(relay: Relay, **_: object) -> ResumeReport:
        relays.append(relay)
        return report(0.0)

    monkeypatch.setattr(command, "run_relay", take)
    status, output = call(f"verify {arguments}")
    assert status == 0, output
    return relays[0]


def test_few_batches_are_taken_in_turn_and_both_curves_are_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(command, "draw_curves", lambda *arguments: drawn.append(arguments))
    picture = tmp_path / "curves.svg"
    relay = relay_of(monkeypatch, f"--tp 2 --batches 2 --steps 3 --plot {picture}")
    assert drawn == [(picture, [2.0], {"tp2·fp32": [2.0]})]
    first, second, third = ([batch["input_ids"].tolist() for batch in step] for step in relay.batches(0))
    assert first == third != second


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    words = ("batches=0 must be at least 1", "must end in one of .pdf, .png, .svg", "there is no folder")
    require_refused(f"verify --batches 0 --plot {tmp_path}/nowhere/curves.jpg", *words)


def test_further_legs_inherit_precision_microbatches_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "--precision fp16 --microbatches 4 --steps 2 --max-norm 0.5 --dp 2"
    second, third = "--then '--pp 2 --schedule zbv'", "--then '--sp 2 --precision=bf16 --steps 5'"
    relay = relay_of(monkeypatch, f"{first} {second} {third}")
    same = {"microbatches": 4, "max_norm": 0.5}
    assert relay.legs == (
        Leg(layout=Layout(dp=2, precision="fp16", **same), num_steps=2),
        Leg(layout=Layout(pp=2, schedule="zbv", precision="fp16", **same), num_steps=2),
        Leg(layout=Layout(sp=2, sequence="all_to_all", precision="bf16", **same), num_steps=5),
    )


def test_a_difference_from_the_saved_contents_is_named_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    handover = Handover(step=1, num_tensors=9, differing=("exp_avg/a.weight",))
    wrong = ResumeReport(steps=report(0.5).steps, departure=str(handover), handovers=(handover,))
    monkeypatch.setattr(command, "run_relay", lambda *_, **__: wrong)
    status, output = call("verify --then '--pp 2'")
    assert status == 1
    assert "departs: after step 1: exp_avg/a.weight differ from what was saved" in output


def kill_rank_1(rank: int, *_: object) -> None:
    dist.barrier()  # otherwise rank 0 may end before rank 1 has connected to it
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_dies_is_reported_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_run_leg", kill_rank_1)
    status, output = call("verify --tp 2")
    assert status == 1
    assert "rank 1 failed: process 1 terminated with signal SIGKILL" in output


@pytest.mark.parametrize(
    "row",
    [
        ("--model sam --tp 3", "num_attention_heads=4 is not divisible by tp_size=3"),
        ("--pp 5", "4 layers and the pipeline 5 stages"),
        ("--pp 3 --schedule zbv", "4 layers and the pipeline 6 stages"),
        ("--pp 5 --steps 0", "4 layers and the pipeline 5 stages", "steps=0"),
        ("--pp 0 --steps 0", "pp_size=0 must be at least 1", "steps=0 must be at least 1"),
        ("--precision fp8 --schedule zigzag", "'fp8'", "'zigzag'"),
        ("--model nonesuch --zero 9", "'nonesuch' is not a model type", "zero_stage=9"),
        ("--model t5 --head causal --tp 2", "no 't5' with head 'causal'", "seq2seq"),
        ("--model xglm --tp 2", "no split of a XGLMForCausalLM gives the numbers of one process"),
        ("--microbatches 0", "num_microbatches=0"),
        ("--tp two", "'--tp'", "integer"),
        ("--then '--pp two'", "'--pp'", "integer"),
        ("--then '--pq 2'", "--pq"),
        ("--then --install-completion", "--install-completion"),  # else torch would write to the user's home
        ("--then '--pp 5' --zero 9", "zero_stage=9", "--then number 1: the model has 4 layers"),
        (
            "--then '--seed 3 --max-norm 1'",
            *(f"--{option} applies to the whole run" for option in ("seed", "max-norm")),
        ),
        ("""--then "--pp 2 --schedule 'gpipe" """, "No closing quotation"),
    ],
)
def test_bad_arguments_are_refused_all_at_once_with_status_2(
    monkeypatch: pytest.MonkeyPatch, row: tuple[str, ...]
) -> None:
    monkeypatch.setattr(command, "run_relay", lambda *_, **__: pytest.fail("a process was started"))
    arguments, *words = row
    require_refused(f"verify {arguments}", *words)


def test_errors_of_weight_sharding_and_of_the_split_are_reported_together() -> None:
    dropping = ModelChoice(model_type="opt", settings=(("layerdrop", 0.1),))
    split, sharing = command.sharding_errors(dropping, HybridConfig(pp_size=2, wp_size=2))
    assert sharing.startswith("layerdrop=0.1 in the model's config")
    assert split.startswith("layerdrop=0.1 in the model's config") and "the stages of a pipeline" in split
    unknown = ModelChoice(model_type="funnel")
    (sharing,) = command.sharding_errors(unknown, HybridConfig(wp_size=2))
    assert "the layers of a FunnelForMaskedLM are unknown" in sharing and "wp_size=1" in sharing
    assert len(command.sharding_errors(unknown, HybridConfig(pp_size=2, wp_size=2))) == 2


def test_every_default_head_can_be_built() -> None:
    for model_type in ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3"):
        assert command.argument_errors(ModelChoice(model_type=model_type), Layout(tp=2, pp=2), 1) == []
    for model_type in ("t5", "mt5", "umt5"):
        assert command.argument_errors(ModelChoice(model_type=model_type), Layout(tp=2), 1) == []


def answer_or_fail(rank: int, fails: bool) -> list[int]:
    if rank == 1 and fails:
        raise ValueError("no such luck")
    return [rank] * 2**18  # 2 MB, more than a pipe holds


@pytest.mark.slow
def test_every_process_answers_and_one_that_raises_is_named_with_its_traceback() -> None:
    assert run_on_processes(answer_or_fail, (False,), num_processes=1, timeout_seconds=60) == [[0] * 2**18]
    report = run_on_processes(answer_or_fail, (True,), num_processes=2, timeout_seconds=60)
    assert isinstance(report, str)
    assert report.startswith("rank 1 failed: ") and "Traceback" in report
    assert "ValueError: no such luck" in report


@pytest.mark.parametrize(
    ("options", "replicas"),
    [({}, 1), ({"ep": 4}, 4), ({"ep": 4, "sp": 2}, 2), ({"wp": 2, "ep": 3}, 6), ({"dp": 8, "ep": 2}, 8)],
)
def test_without_dp_a_layout_has_as_few_replicas_as_fit(options: dict[str, int], replicas: int) -> None:
    sizes = {"sp": 1, "wp": 1, "ep": 1, "dp": None, "sp_mode": None}
    assert command.layout_of(sizes | options).dp == replicas
