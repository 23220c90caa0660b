"""The parameters of a model that are moved to a rank's device."""

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.shardformer.shard_config import ShardConfig
from echelon.shardformer.shard_former import ShardFormer

from ..pool import on_ranks
from .training import hybrid


@pytest.mark.parametrize("how", ["tp_size", "pp_size", "wp_size", "shard_model"])
@on_ranks(2)
def test_a_model_is_cut_before_it_reaches_a_device(how: str) -> None:
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    total, numbers, to = model.num_parameters(), list[int](), nn.Module.to

    def noted(self: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        numbers.append(sum(parameter.numel() for parameter in self.parameters()))
        return to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "to", noted)
        if how == "shard_model":
            former = ShardFormer(ShardConfig(tensor_parallel_size=2))
            former.init_distributed()
            former.shard_model(model)
        else:
            hybrid(**{how: 2}).boost(model)
    # Norms are replicated, embeddings too with wp_size, and a stage has one end of the model.
    (number,) = numbers
    assert number < (0.8 if how == "wp_size" else 0.6) * total, number
