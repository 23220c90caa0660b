"""Seq2SeqTrainer on one process against the one under a plugin: losses, generated texts and their metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ..pool import Pool
from .runs import VOCAB, Run, differences, result, texts, tokenizer
from .test_misuse import quiet
from .test_trainer import LAYOUTS, TOLERANCE


def turned(number: int, seed: int) -> list[dict[str, Any]]:
    """Return texts with a part of them, turned around, as labels."""
    return [
        dict(
            input_ids=row["input_ids"],
            attention_mask=row["attention_mask"],
            labels=row["input_ids"].flip(0)[:7].clamp(min=2),
        )
        for row in texts(number, seed)
    ]


def generated(prediction: Any) -> dict[str, float]:
    """Return numbers of generated texts."""
    return {"tokens": float(prediction.predictions.sum()), "rows": len(prediction.predictions)}


def translated(folder: str, plugin: dict[str, Any] | None, dp: int = 1) -> dict[str, Any] | None:
    """Train and generate, on one process without `plugin`; return the numbers on the first rank."""
    import transformers

    from echelon.trainer import Seq2SeqTrainer

    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    )
    settings = dict(
        gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1, optim="sgd", learning_rate=0.1
    )
    settings |= dict(
        eval_strategy="epoch", predict_with_generate=True, generation_max_length=9, save_strategy="no"
    )
    trainer_class = transformers.Seq2SeqTrainer if plugin is None else Seq2SeqTrainer
    trainer = trainer_class(
        model,
        quiet(folder, kind=transformers.Seq2SeqTrainingArguments, batch_size=8 // dp, **settings),
        train_dataset=turned(43, 1),
        eval_dataset=turned(13, 2),
        compute_metrics=generated,
        processing_class=tokenizer(),
        data_collator=transformers.default_data_collator,
        **({} if plugin is None else {"plugin": plugin}),
    )
    return result(trainer, Run(folder, predicts=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2 zero1"])
def test_texts_are_generated_as_on_one_process(pool: Pool, tmp_path: Path, layout: str) -> None:
    one = pool.run(1, translated, str(tmp_path / "one"), None)[0]
    tried = LAYOUTS[layout]
    other = pool.run(tried.world, translated, str(tmp_path / "other"), tried.plugin, tried.dp, timeout=200)[0]
    assert differences(one, other, tolerance=TOLERANCE) == []
