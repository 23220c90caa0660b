"""ChatGLM2 and 3, whose code comes with the checkpoint: few keys and values behind the queries of one projection."""

from ...pipeline.plan import StagePlan
from ..head_order import HeadOrder
from ..table import RegionDropout, Table

_ATTENTION = "self_attention"
_CORE = f"{_ATTENTION}.core_attention"
_GROUPS = f"{_ATTENTION}.num_multi_query_groups_per_partition"

CHATGLM = Table(
    stage=StagePlan(layers="encoder.layers", entry=("embedding",), arity=2),
    regions=(_ATTENTION, "mlp"),
    column=(f"{_ATTENTION}.query_key_value", "mlp.dense_h_to_4h"),
    row=(f"{_ATTENTION}.dense", "mlp.dense_4h_to_h"),
    fused={f"{_ATTENTION}.query_key_value": HeadOrder.BY_KIND, "mlp.dense_h_to_4h": 2},
    key_value_heads=_GROUPS,
    divide=(
        *(f"{path}.num_attention_heads_per_partition" for path in (_ATTENTION, _CORE)),
        f"{_CORE}.hidden_size_per_partition",
    ),
    divide_key_value=(_GROUPS,),
    needed={"multi_query_attention": True},  # else the heads lie in another order
    dropout={
        _ATTENTION: RegionDropout(probability=f"{_CORE}.attention_dropout.p", row=f"{_ATTENTION}.dense")
    },
    embedding="embedding.word_embeddings",
    heads=("transformer.output_layer",),
)
