"""transformers' Trainer, and every subclass of it, under Echelon's plugins. Needs accelerate: `echelon[trainer]`.

    from echelon import Trainer                         # instead of: from transformers import Trainer
    from echelon.trainer import SFTTrainer              # instead of: from trl import SFTTrainer
    Trainer(model, args, train_dataset=data, plugin=dict(tp_size=2, pp_size=2, num_microbatches=4))

The names are imported when they are used, so that `import echelon` needs neither accelerate nor trl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time __getattr__ does the same
    from .mixin import EchelonTrainerMixin

    class Trainer(EchelonTrainerMixin): ...


__all__ = ["EchelonTrainerMixin", "Trainer"]

# The trainers that have tests here, by the package that defines them. For others: EchelonTrainerMixin.
_TRAINERS = {
    "Trainer": "transformers",
    "Seq2SeqTrainer": "transformers",
    "SFTTrainer": "trl",
    "DPOTrainer": "trl",
}


def __getattr__(name: str) -> Any:
    """Return the mixin, or the subclass of a known trainer that has it, made when it is first used."""
    if name != "EchelonTrainerMixin" and name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        mixin = import_module(f"{__name__}.mixin").EchelonTrainerMixin
    except ImportError as error:
        if error.name != "accelerate":
            raise
        raise ImportError('echelon.trainer needs accelerate: pip install "echelon[trainer]"') from error
    if name == "EchelonTrainerMixin":
        return mixin
    native = getattr(import_module(_TRAINERS[name]), name)
    made = type(name, (mixin, native), {"__module__": __name__, "__doc__": mixin.__doc__})
    return globals().setdefault(name, made)


def __dir__() -> list[str]:
    return sorted({*globals(), *_TRAINERS, "EchelonTrainerMixin"})
