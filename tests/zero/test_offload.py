"""Masters, their gradients and optimizer states on the CPU; here this is separate memory of the same machine."""

import copy
from typing import Any

import torch
from torch import nn

from echelon.cluster.mesh import ParallelMesh
from echelon.plugins.hybrid_parallel import Ledger
from echelon.zero import bucket as buckets

from ..pool import on_ranks
from ..registered_memory import registered_memory
from .helpers import Precision, assert_same_bits, shard, small_model, train, weights_of

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
HIDDEN = 64
PSI = 3 * HIDDEN**2


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@on_ranks(2)
def test_states_resume_bit_for_bit_with_and_without_offload() -> None:
    for stage in (0, 1, 2):
        for precision in PRECISIONS:
            plain, offloaded = small_model(), small_model()
            optimizer = shard(plain, adamw, stage=stage, precision=precision)
            other = shard(offloaded, adamw, stage=stage, precision=precision, cpu_offload=True)
            pairs = ((plain, optimizer), (offloaded, other))
            for pair in pairs:
                train(*pair, range(2))
            assert_same_bits(other.masters(), optimizer.masters())
            state = copy.deepcopy(optimizer.local_state())
            optimizer.load_state_dict(other.local_state())
            other.load_state_dict(state)
            for pair in pairs:
                train(*pair, range(2, 4))
            assert_same_bits(other.masters(), optimizer.masters())
            assert_same_bits(weights_of(offloaded), weights_of(plain))


@on_ranks(2)
def test_offloaded_tensors_have_their_own_memory_and_are_reported_separately() -> None:
    for precision, width in (("fp32", 4), ("bf16", 2)):
        for stage, share, gradients, buffers in (
            (0, 1, 4 * PSI, 0),
            (1, 2, 4 * PSI, 0),
            (2, 2, 4 * PSI // 2, 2 * 4 * HIDDEN**2),
        ):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)))
            arguments = {"stage": stage, "precision": precision, "bucket_size": HIDDEN**2}
            optimizer = shard(model, adamw, **arguments, cpu_offload=True)  # type: ignore[arg-type]
            dtype = next(model.parameters()).dtype
            optimizer.backward(model(torch.ones(2, HIDDEN, dtype=dtype)).float().pow(2).mean())
            optimizer.step()
            held = Ledger(ParallelMesh(), optimizer).held
            assert dict(held.items()) == {
                "parameters": width * PSI,
                "gradients": gradients,
                "buffers": buffers,
                "masters": 0,
                "states": 0,
                "scalars": held["scalars"],
                "offloaded_gradients": 4 * PSI // share,
                "offloaded_masters": 4 * PSI // share,
                "offloaded_states": 8 * PSI // share,
            }, (precision, stage)
            for bucket in optimizer.buckets:
                places = {
                    tensor.untyped_storage().data_ptr()
                    for tensor in (
                        bucket.parameters,
                        bucket.masters,
                        bucket.gradient_slice,
                        bucket.stepped_gradients,
                    )
                }
                assert len(places) == 4, "two share their memory"
                assert all(slot.piece.device.type == "cpu" for slot in bucket.slots if slot.piece is not None)


@on_ranks(2)
def test_masters_and_their_gradients_are_pinned_and_nothing_else_is() -> None:
    hidden = 48  # buffers of 9,216 or 4,608 bytes; as powers of two they would be 16,384 and 8,192
    for stage, share in ((0, 1), (1, 2), (2, 2)):
        model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(3)))
        with registered_memory(buckets) as registered:
            optimizer = shard(model, adamw, stage=stage, bucket_size=hidden**2, cpu_offload=True)
            optimizer.backward(model(torch.ones(2, hidden)).pow(2).mean())
            optimizer.step()
            held = Ledger(ParallelMesh(), optimizer).held
            assert registered.nbytes == 8 * 3 * hidden**2 // share
            assert registered.nbytes == held["offloaded_gradients"] + held["offloaded_masters"]
            assert set(registered.sizes.values()) == {4 * hidden**2 // share}
            assert set(registered.sizes) == {
                tensor.data_ptr()
                for bucket in optimizer.buckets
                for tensor in (bucket.masters, bucket.stepped_gradients)
            }
            del optimizer, model
