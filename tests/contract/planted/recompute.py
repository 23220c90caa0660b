"""Faults in recomputation: skipped modules, and inputs offloaded to the host that return late or to another layer.

Copies complete late under `LateStream`; on CPUs they would complete at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...cluster.test_device import test_copies_run_beside_the_computation_and_are_waited_for_by_it_alone
from ...shardformer.test_checkpoint_config import test_named_modules_run_twice_and_no_others
from ...shardformer.test_offload import test_copies_are_waited_for_and_their_memory_is_held
from ..mutations import around, fault, returning

OFFLOAD, COPIES = "shardformer.offload:ActivationOffload", "cluster.device:CopyStream"


def with_late_copies(modules: tuple[str, ...] | None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        test_copies_are_waited_for_and_their_memory_is_held(patched, modules, 3)


def with_streams_of_cuda() -> None:
    with pytest.MonkeyPatch.context() as patched:
        test_copies_run_beside_the_computation_and_are_waited_for_by_it_alone(patched)


def of_another_layer(begin: Callable[..., Any], self: Any, waiting: Any) -> Any:
    """Return the offloaded input of the previous layer, if there is one."""
    return waiting, *begin(self, waiting.previous() or waiting)[1:]


def let_go_at_once(self: Any) -> None:
    """Free an offloaded input before its copy is complete."""
    self._being_offloaded.popleft()


def without_feed_forward(recomputed: Callable[..., Any], kind: type[nn.Module]) -> type[nn.Module]:
    return kind if kind.__name__.endswith("MLP") else recomputed(kind)


# fmt: off
FAULTS = {
    "a layer gets the input of the one before it": fault(f"{OFFLOAD}._begin_fetch", around(of_another_layer),
        ModelChoice(model_type="llama", num_layers=3), Layout(recompute=1.0, options=("activation_offload",)),
        notice="^step 1: gradient of "),
    "an offloaded input is not waited for": fault(f"{OFFLOAD}._begin_fetch",
        around(lambda begin, self, waiting: (*begin(self, waiting)[:2], 0)), partial(with_late_copies, None),
        num_ranks=1, notice="^AssertionError"),
    "an input is freed while it is offloaded": fault(f"{OFFLOAD}._release_oldest", let_go_at_once,
        partial(with_late_copies, ("self_attn", "mlp")), num_ranks=1,
        notice="^AssertionError: memory was freed while it was copied"),
    "the computation does not wait for the stream of copies": fault(f"{COPIES}.wait", returning(None),
        with_streams_of_cuda, num_ranks=1, notice="^AssertionError: Expected 'wait_event' to be called once"),
    "a named module is not recomputed": fault("shardformer.recompute:_recomputed_class", around(without_feed_forward),
        test_named_modules_run_twice_and_no_others, num_ranks=1, notice="^AssertionError"),
    "modules of all layers are recomputed": fault("shardformer.recompute:_recomputed",
        lambda layers, config: [layer for local in layers.values() for layer in local],
        test_named_modules_run_twice_and_no_others, num_ranks=1, notice="^AssertionError"),
}
# fmt: on
