"""The vision transformers of timm (ViT, DeiT), which have no config: registered by their classes."""

from ...pipeline.plan import StagePlan
from ..table import RegionDropout, Table

TIMM_VIT = Table(
    stage=StagePlan(
        layers="blocks",
        entry=("patch_embed", "norm_pre"),
        everywhere=("cls_token", "reg_token", "dist_token", "pos_embed"),
        are_entries_reckoned=True,  # the tokens come after them
    ),
    regions=("attn", "mlp"),
    column=("attn.qkv", "mlp.fc1"),
    row=("attn.proj", "mlp.fc2"),
    attention={"attn": "attn.proj"},
    query_heads="attn.num_heads",
    fused={"attn.qkv": 3},
    divide=("attn.num_heads", "attn.attn_dim"),
    partial=("attn.q_norm", "attn.k_norm"),
    dropout={
        "attn": RegionDropout(probability="attn.attn_drop.p", row="attn.proj"),
        "mlp": RegionDropout(probability="mlp.drop1.p", row="mlp.fc2"),
    },
)
