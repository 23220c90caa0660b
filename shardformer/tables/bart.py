"""BART and its family (mBART, Pegasus, Marian): Whisper's layers under embeddings of text."""

from dataclasses import replace

from ...pipeline.plan import StagePlan
from ..table import Table
from .whisper import WHISPER


def _stage(*entry: str) -> StagePlan:
    return StagePlan(
        module="decoder",
        layers="decoder.layers",
        entry=tuple(f"decoder.{name}" for name in entry),
        encoder=StagePlan(
            module="encoder",
            layers="encoder.layers",
            entry=("shared", *(f"encoder.{name}" for name in entry)),
        ),
    )


PEGASUS = replace(
    WHISPER,
    stage=_stage("embed_tokens", "embed_positions"),
    further_embeddings=("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    heads=("lm_head",),
)
# Their embeddings are of a class that scales, and stay whole, as does the head that is tied to them.
BART: Table = replace(
    PEGASUS,
    stage=_stage("embed_tokens", "embed_positions", "layernorm_embedding"),
    further_embeddings=(),
    heads=(),
)
