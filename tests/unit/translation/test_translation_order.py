"""Predictions are written in the order of the file that they translate."""

import pytest
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from distill.config import DistillationConfig
from distill.trainer import DistillationTrainer
from translation.trainer import TranslationTrainer


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "options"),
    [
        (TranslationTrainer, Seq2SeqTrainingArguments, {}),
        (DistillationTrainer, DistillationConfig, {"kd_alpha": 0.0}),
    ],
)
def test_predictions_stay_in_order(trainer_class, config_class, options, tmp_path):
    options |= {"train_sampling_strategy": "group_by_length", "use_cpu": True}
    options |= {"per_device_eval_batch_size": 1, "report_to": "none"}
    arguments = config_class(str(tmp_path), **options)
    model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_ff=8, num_layers=1))
    rows = [{"input_ids": [1] * length, "labels": [1]} for length in (3, 1, 4, 1, 5)]
    loader = trainer_class(model=model, args=arguments).get_test_dataloader(rows)
    assert [batch["input_ids"].shape[1] for batch in loader] == [3, 1, 4, 1, 5]
