"""The parameters of a model that are moved to a rank's device."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin
from echelon.shardformer.shard_config import ShardConfig
from echelon.shardformer.shard_former import ShardFormer

from ..pool import Pool


def moved(how: str) -> tuple[int, list[int]]:
    """Count the parameters of the full model, and those moved to the device."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    total, numbers, to = model.num_parameters(), list[int](), nn.Module.to

    def noted(self: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        numbers.append(sum(parameter.numel() for parameter in self.parameters()))
        return to(self, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "to", noted)
        if how == "shard_model":
            former = ShardFormer(ShardConfig(tensor_parallel_size=2))
            former.init_distributed()
            former.shard_model(model)
        else:
            plugin = HybridParallelPlugin(precision="fp32", num_microbatches=2, **{how: 2})  # type: ignore[arg-type]
            Booster(plugin=plugin).boost(model)
    return total, numbers


@pytest.mark.parametrize("how", ["tp_size", "pp_size", "wp_size", "shard_model"])
def test_a_model_is_cut_before_it_reaches_a_device(pool: Pool, how: str) -> None:
    for total, numbers in pool.run(2, moved, how):
        # Norms are replicated, embeddings too with wp_size, and a stage has one end of the model.
        assert numbers and max(numbers) < (0.8 if how == "wp_size" else 0.6) * total
