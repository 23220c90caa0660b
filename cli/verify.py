"""`echelon verify`: its options. What it does is check.py, going on from a checkpoint relay.py."""

from typing import Annotated

import typer

from .console import refuse


def verify(
    model: Annotated[str, typer.Option(help="Model type of transformers: llama, bert, t5, ...")] = "llama",
    head: Annotated[
        str | None, typer.Option(help="causal, classification, seq2seq, ...; the usual one of the model")
    ] = None,
    tied: Annotated[bool, typer.Option(help="Share the embedding's weight with the head.")] = False,
    layers: Annotated[int, typer.Option(help="Layers of the small model; of encoder and decoder each.")] = 4,
    tp: Annotated[int, typer.Option(help="Ranks over which layers are split.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas with different batches.")] = 1,
    sp: Annotated[
        int, typer.Option(help="Ranks over which sequences are spread: all_to_all, ring_attn.")
    ] = 1,
    sp_mode: Annotated[
        str | None,
        typer.Option(help="split_gather or ring (over --tp), all_to_all or ring_attn (over --sp)."),
    ] = None,
    wp: Annotated[int, typer.Option(help="Ranks that share out the weights of linear layers.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage: 0, 1 or 2.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved, zbh1 or zbv.")] = "1f1b",
    chunks: Annotated[int, typer.Option(help="Pipeline stages per rank: interleaved and gpipe.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a batch, of unequal size.")] = 3,
    recompute: Annotated[float, typer.Option(help="Share of each stage's layers computed again.")] = 0.0,
    max_norm: Annotated[float, typer.Option(help="Clip gradients to this norm; 0 does not.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds until a process that hangs is given up.")] = 300.0,
    then: Annotated[
        list[str] | None,
        typer.Option(
            help='Save, and go on in new processes under this layout, "--pp 2 --zero 1" for example; any number of '
            "times. Precision, microbatches and steps stay where they are not given."
        ),
    ] = None,
) -> None:
    """Train a small model under a layout and in one process, and compare every step.

    Starts tp * pp * dp * sp local processes. Exit status: 0 all agree, 1 something departs (the first is named) or
    a process failed, 2 bad arguments.
    """
    # Here and not above, so that help is answered without torch.
    from ..verify.models import ModelChoice
    from ..verify.resume import Part
    from .check import layout_of, part_faults, report_of, show
    from .relay import further_options

    choice = ModelChoice(model_type=model, head=head, tied=tied, num_layers=layers)
    first = {
        **dict(tp=tp, pp=pp, dp=dp, sp=sp, sp_mode=sp_mode, wp=wp, zero=zero, precision=precision),
        **dict(schedule=schedule, chunks=chunks, microbatches=microbatches, max_norm=max_norm),
        **dict(recompute=recompute, steps=steps),
    }
    options = typer.Typer(add_completion=False)
    options.command()(verify)
    further, faults = further_options(options, then or (), first)
    parts = [Part(layout=layout_of(each), num_steps=each["steps"]) for each in (first, *further)]
    refuse("verify", faults + part_faults(choice, parts))
    report = report_of(choice, parts, seed=seed, timeout_seconds=timeout)
    if isinstance(report, str):
        typer.echo(report, err=True)
        raise typer.Exit(1)
    layouts = ", then ".join(str(part.layout) for part in parts)
    comma = "," if further else ""
    show(report, title=f"{model} ({choice.described_head}) under {layouts}{comma} beside one process")
    raise typer.Exit(0 if report.agrees else 1)
