"""Parallel layers, each built from the native module that it replaces."""

from .embedding import VocabParallelEmbedding1D, VocabParallelLMHead1D
from .linear import (
    FusedLinear1D_Col,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from .parallel_module import ParallelModule
from .region import PartialGradient, Region
from .vocabulary_loss import VocabParallelLogits, vocab_parallel_cross_entropy

__all__ = [
    "FusedLinear1D_Col",
    "GPT2FusedLinearConv1D_Col",
    "GPT2FusedLinearConv1D_Row",
    "Linear1D_Col",
    "Linear1D_Row",
    "ParallelModule",
    "PartialGradient",
    "Region",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "VocabParallelLogits",
    "vocab_parallel_cross_entropy",
]
