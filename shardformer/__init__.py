"""Shardformer: tensor-parallel policies, layers and tables of models. It does not depend on optimizers."""

from .gradients import clip_grad_norm_
from .policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from .policy_choice import policy_for
from .recompute import PipelineGradientCheckpointConfig
from .shard_config import ShardConfig
from .shard_former import ShardFormer, shard_model
from .sharder import ModelSharder
from .tables.table import RegionDropout, Table, model_types, register, register_class, table_for

__all__ = [
    "ModelSharder",
    "ModulePolicyDescription",
    "PipelineGradientCheckpointConfig",
    "Policy",
    "RegionDropout",
    "ShardConfig",
    "ShardFormer",
    "SubModuleReplacementDescription",
    "Table",
    "clip_grad_norm_",
    "model_types",
    "policy_for",
    "register",
    "register_class",
    "shard_model",
    "table_for",
]
