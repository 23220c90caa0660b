"""Every mixture of transformers is distributed by `ep_size`, or refused with the reason."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from echelon.shardformer.expert_sharding import expert_errors
from echelon.shardformer.tables.experts import INTERFACES, REFUSED
from echelon.verify.model_choice import ModelChoice

MODELS = Path(transformers.__file__).parent / "models"
# Classes of experts, of blocks that contain them, and of routers.
MIXTURE = re.compile(r"^class (\w*(?:Expert|MoE|Moe|MoA|TopK\w*Router|Top\dRouter)\w*)\(nn\.", re.MULTILINE)
SIZES = re.compile(r"self\.(num_experts|experts)\b")
COMMON = "\n@use_experts_implementation"
# The last type that got the common interface.
IS_OLDER = COMMON not in (MODELS / "aria" / "modeling_aria.py").read_text()


def outcomes() -> dict[str, list[str]]:
    """Return what becomes of the experts of every file with a mixture."""
    mixtures = {}
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        classes = MIXTURE.findall(source)
        if not classes and not SIZES.search(source):
            continue
        is_named = [name for name in classes if name in INTERFACES or name in REFUSED]
        mixtures[path.stem] = ["common"] * (COMMON in source) + is_named
    return mixtures


@pytest.mark.skipif(IS_OLDER, reason="the table is that of transformers 5.24")
def test_every_mixture_is_distributed_or_refused() -> None:
    mixtures = outcomes()
    assert [name for name, outcome in mixtures.items() if len(outcome) != 1] == []
    assert {name for (name,) in mixtures.values()} == {"common", *INTERFACES, *REFUSED}


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("jetmoe", {}, "cannot distribute the JetMoeParallelExperts of a JetMoeForCausalLM: use ep_size=1"),
        (
            "doge",
            {"is_moe": True, "num_experts": 16},
            "cannot distribute the DogeCDMoE of a DogeForCausalLM: use ep_size=1",
        ),
        (
            "longcat_flash",
            {"zero_expert_num": 3},
            "ep_size=2 does not divide the 3 experts of model.layers.0.mlp.experts",
        ),
    ],
)
def test_experts_that_cannot_be_distributed_are_refused(
    model_type: str, settings: dict[str, object], reason: str
) -> None:
    model = ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta()
    error, *_ = expert_errors(model, 2)
    assert reason in error


def test_experts_that_a_further_input_chooses_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.VitPoseBackbone(
            transformers.VitPoseBackboneConfig(num_experts=2, part_features=8)
        )
    error, *_ = expert_errors(model, 2)
    assert "cannot distribute the VitPoseNaiveMoe of a VitPoseBackbone" in error
