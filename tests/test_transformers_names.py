"""Internals of transformers are named in one file, so that a release that renames them touches that file alone."""

import ast
import re
from collections.abc import Iterator

import pytest

from echelon.cluster import transformers_api as api

from .test_project import ROOT, imports, module_name, package_sources

HOME = ROOT / "cluster" / "transformers_api.py"
# Names that differ between releases. `cache` is one only as a string or a keyword: functools has it too.
NAMES = frozenset(
    (
        *(*api.CACHE_NAMES, "past_key_value", "cache_position"),
        *(api.ATTENTION, api.EAGER_FUNCTION, api.ATTENTION_TABLE, "_can_set_attn_implementation"),
        *(api.SUPPORTS_SDPA, api.SUPPORTS_FLASH, api.SUPPORTS_FLEX, "_experts_implementation"),
        *(api.ROUTER_LOSS, api.ROUTER_FORMAT),
        *("gradient_checkpointing", "_gradient_checkpointing_func", api.TP_PLAN, api.PP_PLAN),
    )
)
_WORD = re.compile(r"\w+")


def names_of_transformers(source: str) -> list[str]:
    """Return the internals of transformers that a source names: imports of its modules, and NAMES in code."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    texts = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # docstrings
    }
    targets = [
        target
        for _, is_relative, target in imports(source, "echelon.any")
        if not is_relative and re.match(r"transformers\.([a-z_]+$|\w+\.)", target)
    ]
    return [*targets, *(name for node in nodes if id(node) not in texts for name in _named(node))]


def _named(node: ast.AST) -> Iterator[str]:
    words: list[str] = []
    if isinstance(node, ast.Attribute):
        words = [node.attr] if node.attr != "cache" else []
    elif isinstance(node, ast.keyword):
        words = [node.arg or ""]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # In prose "cache" is a word; alone it is a name.
        is_prose = " " in node.value
        words = [word for word in _WORD.findall(node.value) if not (is_prose and word == "cache")]
    return (word for word in words if word in NAMES)


# Files that know transformers' Trainer, beside the one that knows its models.
OF_TRAINER = {
    "echelon.trainer.arguments": "names of TrainingArguments",
    "echelon.trainer.boosted": "switches off what Trainer has switched on in a model",
    "echelon.trainer.internals": "the inside of Trainer",
}


def test_only_one_small_file_names_internals_of_transformers() -> None:
    assert names_of_transformers(HOME.read_text()) and HOME.read_text().count("\n") <= 300
    by_module = {
        module_name(path): names
        for path in package_sources()
        if path != HOME and (names := names_of_transformers(path.read_text()))
    }
    assert by_module.keys() == OF_TRAINER.keys()


@pytest.mark.parametrize(
    "source",
    [
        "from transformers.masking_utils import causal_mask_function",
        "from transformers import modeling_utils",
        "import transformers.cache_utils",
        'kwargs["cache"]',
        "model(ids, cache=None)",
        "outputs.past_key_values",
        'takes(model, "layer_past")',
        "config._attn_implementation",
        "f'no {x} base_model_tp_plan'",
        're.compile("ALL_ATTENTION_FUNCTIONS")',
    ],
)
def test_internals_of_transformers_are_found(source: str) -> None:
    assert names_of_transformers(source)


@pytest.mark.parametrize(
    "source",
    [
        "from transformers import AutoConfig, PreTrainedModel",
        "from functools import cache\nimport functools\n@functools.cache\ndef f(cache: int) -> None: ...",
        '"""Without past_key_values."""\nraise ValueError("ring attention supports no cache")',
        "model.set_attn_implementation(kernel)",
    ],
)
def test_public_names_and_prose_are_none(source: str) -> None:
    assert names_of_transformers(source) == []
