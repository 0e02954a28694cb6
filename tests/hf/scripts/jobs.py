"""Tiny models, data and Trainer runs for the tests of this folder. An ordinary script, which does
not mention zero.

`python jobs.py JOBS.json` runs each job in turn. Rank 0 writes the results to the job's `report`
file. A job:

    model       "llama", "mixtral" or "t5"
    dropout     optional: of the T5
    samples     optional: how many samples it trains on
    arguments   keyword arguments of `Seq2SeqTrainingArguments`
    reference   optional: {"parameters": {...}, "factors": [...]}, of AdamW and the learning-rate
                factor of each step, for a run without DeepSpeed
    report      path of the JSON file to write
    predict     optional: generate for the evaluation set
    save        optional: call `save_model` at the end
    sequence    optional: how many ranks share a sequence
    replicas    optional: how many groups of ranks hold a whole model
    tensor      optional: how many ranks share each layer, as accelerate says it; the others are
                data-parallel
    resume      optional: the checkpoint to begin with
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

# A multiple of every global batch used here, so that no sample is repeated to fill a batch.
SAMPLES = 16
# 7 leaves the ranks with unequal numbers of samples.
EVALUATION_SAMPLES = {"llama": 8, "mixtral": 8, "t5": 7}


class Tokens(torch.utils.data.Dataset):
    """Random tokens.

    The labels of all samples have one length, so a mean over ranks is a mean over tokens.
    """

    def __init__(self, size: int, seq2seq: bool):
        self.size = size
        self.seq2seq = seq2seq

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        if not self.seq2seq:
            tokens = torch.randint(3, 60, (8,), generator=generator).tolist()
            # No token predicts the first one. Releases of transformers differ in whether they count
            # its label among the items of a batch, unless it is masked.
            return {"input_ids": tokens, "labels": [-100, *tokens[1:]]}
        source = torch.randint(3, 60, (5 + index % 4,), generator=generator).tolist()
        return {
            "input_ids": source,
            "attention_mask": [1] * len(source),
            "labels": source[:5][::-1],
        }


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: pad_sequence(
            [torch.tensor(s[key]) for s in samples], batch_first=True, padding_value=padding[key]
        )
        for key in samples[0]
    }


def make_model(name: str, dropout: float = 0.0) -> torch.nn.Module:
    set_seed(0)
    if name == "t5":
        config = T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            dropout_rate=dropout, decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)
    if name == "mixtral":
        config = MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
        return MixtralForCausalLM(config)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32, tie_word_embeddings=True,
        use_cache=False,  # `torch.compile` would make a graph for each block's cache
    )  # fmt: skip
    return LlamaForCausalLM(config)


def reference_optimizers(model: torch.nn.Module, reference: dict) -> tuple:
    optimizer = torch.optim.AdamW(model.parameters(), **reference["parameters"])
    factors = reference["factors"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factors[min(step, len(factors) - 1)]
    )
    return optimizer, scheduler


def parallelism_of(job: dict) -> dict:
    """The arguments for a job whose ranks share sequences or layers, or are replicas."""
    sizes = {}
    if "sequence" in job:
        sizes = {"sp_backend": "deepspeed", "sp_size": job["sequence"]}
    if "replicas" in job:
        others = int(os.environ["WORLD_SIZE"]) // job["replicas"]
        sizes = {"dp_replicate_size": job["replicas"], "dp_shard_size": others}
    if "tensor" in job:
        others = int(os.environ["WORLD_SIZE"]) // job["tensor"]
        sizes = {"tp_size": job["tensor"], "dp_shard_size": others}
    if not sizes:
        return {}
    from accelerate import ParallelismConfig  # older releases do not have it

    return {"parallelism_config": ParallelismConfig(**sizes)}


def run(job: dict, callbacks: list[TrainerCallback]) -> None:
    # The arguments come first: they tell transformers to build the model sharded.
    job["arguments"] |= parallelism_of(job)
    args = Seq2SeqTrainingArguments(
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **job["arguments"]
    )
    model = make_model(job["model"], job.get("dropout", 0.0))
    seq2seq = job["model"] == "t5"
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Tokens(job.get("samples", SAMPLES), seq2seq),
        eval_dataset=Tokens(EVALUATION_SAMPLES[job["model"]], seq2seq),
        data_collator=collate,
        callbacks=callbacks,
        optimizers=reference_optimizers(model, job["reference"])
        if "reference" in job
        else (None, None),
    )
    trainer.train(resume_from_checkpoint=job.get("resume"))
    report = {
        "log": list(trainer.state.log_history),  # without the evaluation that follows
        "evaluation": trainer.evaluate(),
        "world_size": args.world_size,
        "engine": type(trainer.model_wrapped).__name__,
        "config": getattr(trainer.model_wrapped, "config", {}) if args.deepspeed else {},
        "random": torch.rand(1).item(),
        "held": sum(getattr(each, "ds_tensor", each).numel() for each in model.parameters())
        / sum(each.numel() for each in model.parameters()),
    }
    if job.get("predict"):
        report["predictions"] = trainer.predict(
            trainer.eval_dataset, max_new_tokens=8
        ).predictions.tolist()
    if job.get("save"):
        trainer.save_model()
    if args.process_index == 0:
        Path(job["report"]).write_text(json.dumps(report, default=str), encoding="utf-8")


def main(callbacks: Callable[[dict], list[TrainerCallback]] = lambda job: []) -> None:
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(job, callbacks(job))


if __name__ == "__main__":
    main()
