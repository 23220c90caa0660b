"""Arguments of ColossalAI's plugins, and misspelt ones. Refusals are in tests/refusals."""

from inspect import signature
from pathlib import Path

import pytest

from echelon import Booster, LazyInitContext, LowLevelZeroPlugin, TorchFSDPPlugin

from ..pool import on_ranks
from ..refusals.plugin_rows import COLOSSALAI


@on_ranks(1)
def test_an_unknown_argument_is_answered_with_the_nearest() -> None:
    """Give every argument without one of its letters."""
    for called in (*(plugin for plugin, _ in COLOSSALAI), Booster, LazyInitContext):
        for name, parameter in signature(called).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                with pytest.raises(TypeError, match=rf"did you mean .*{name}"):
                    called(**{name[:3] + name[4:]: 1})


@on_ranks(1)
def test_arguments_of_colossalai() -> None:
    """Accept values that change nothing."""
    for plugin, known_names in COLOSSALAI:
        plugin(**{name: known.accepted[0] for name, known in known_names.items()})
    LowLevelZeroPlugin(norm_type=2)  # equals 2.0
    TorchFSDPPlugin(cpu_offload=None)


def test_the_page_lists_every_argument_that_is_not_available() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-colossalai.md").read_text()
    earlier_arguments = {"wp_memory_pool"}  # an argument of an earlier release of Echelon
    assert [
        name for _, table in COLOSSALAI for name in {*table} - earlier_arguments if f"`{name}" not in page
    ] == []
