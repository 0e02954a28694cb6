"""The arguments of run_distill.py on top of the Trainer's. This imports neither torch nor
transformers, so that `--help` is quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from translation.command_line import Application, option
from translation.options import DTYPES, LoadingArguments

SAMPLINGS = ("top_k", "importance")
LOSS_TYPES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "uld")
SCHEDULES = ("constant", "linear", "cosine")
HIDDEN_LOSSES = ("mse", "cosine")
VOCAB_POLICIES = ("common", "strict")


@dataclass
class AdapterArguments:
    """A student of which only LoRA adapters are trained (PEFT). The names are TRL's."""

    use_peft: bool = option(False, "Train LoRA adapters of the student alone.")
    lora_r: int = option(16, "Rank of the adapters.")
    lora_alpha: int = option(32, "Their scale, times the rank.")
    lora_dropout: float = option(0.05, "Dropout before them.")
    lora_target_modules: list[str] | None = option(  # noqa: RUF009
        None, "Layers, or all-linear. Default: PEFT's."
    )
    merge_adapters: bool = option(False, "Merge them into the student at the end.")


@dataclass
class ModelArguments(AdapterArguments, LoadingArguments):
    """The student and its tokenizer. --teacher_model_name_or_path names the teacher."""

    model_name_or_path: str | None = option(None, "A trained student: folder or hub name.")
    student_config: str | None = option(None, "Configuration of a student from scratch.")
    init_student_from_teacher: str | None = option(
        None, "Or the teacher's layers: 0,5,11, or best:3."
    )
    tokenizer_name: str | None = option(None, "Default: the student's, or the teacher's.")


@dataclass
class DataArguments:
    """The data, and what is written."""

    train_file: str | None = option(None, "JSON (lines), CSV, TSV, Parquet, texts, dataset.")
    validation_file: str | None = option(None, "Held-out data for --do_eval.")
    test_file: str | None = option(None, "Data for --do_predict.")
    streaming: bool = option(False, "Read data while it is used, with --max_steps.")
    max_train_tokens: int | None = option(None, "Use only this many training tokens.")
    max_eval_samples: int | None = option(None, "Use only this many validation blocks.")
    teacher_steps: int | None = option(None, "Steps of the demonstration's teacher (1200).")
    export_dtype: str = option(
        "bfloat16", "Of the exported student.", choices=("bfloat16", "float16", "float32")
    )
    overwrite_output_dir: bool = option(False, "Train anew into a folder with files.")


@dataclass
class ExampleArguments:
    """How records become examples."""

    text_column: str | None = option(None, "Key of a causal model's texts. Default: text.")
    source_column: str | None = option(
        None, "Key of what an encoder-decoder model reads, such as translation.en."
    )
    target_column: str | None = option(None, "Key of the text that it learns to write.")
    source_prefix: str | None = option(None, "Text to put before every source.")
    max_length: int = option(512, "Tokens in a block, or of an unpacked example.")
    packing: bool = option(True, "Pack examples of causal models into blocks.")


@dataclass
class TeacherArguments:
    """The teacher, or a cache of what it says."""

    teacher_model_name_or_path: str | None = option(None, "Model folder or hub name.")
    teacher_revision: str = option("main", "Its branch, tag or commit on the hub.")
    teacher_trust_remote_code: bool = option(False, "Allow its code to run here.")
    teacher_attn_implementation: str | None = option(None, "As --attn_implementation.")
    teacher_dtype: str | None = option(None, "Default: its file's (auto).", choices=DTYPES)
    teacher_deepspeed: str | None = option(
        None, "Its ds_config. Default: stage and precision of --deepspeed, offloaded."
    )
    teacher_device: str | None = option(None, "Device if it is not sharded, such as cuda:1.")
    overlap_teacher: bool = option(False, "Run it beside the student, with more memory.")
    teacher_load_in_4bit: bool = option(False, "Quantize it to NF4 (bitsandbytes).")
    teacher_load_in_8bit: bool = option(False, "Quantize it to LLM.int8 (bitsandbytes).")
    teacher_cache: str | None = option(None, "Folder of cache_teacher, in its place.")
    cache_sampling: str = option(
        "top_k", "What is cached: the k best, or a sample.", choices=SAMPLINGS
    )

    def of_teachers_hub(self, hub: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The options with which transformers finds the teacher's files, on top of `hub`."""
        own = {"revision": self.teacher_revision}
        return {**(hub or {}), **own, "trust_remote_code": self.teacher_trust_remote_code}


@dataclass
class LossArguments:
    """What the student learns from the teacher."""

    loss_type: str = option("forward_kl", "Divergence.", choices=LOSS_TYPES)
    beta: float = option(0.5, "jsd: weight of the teacher, between 0 and 1.")
    skew_alpha: float = option(0.1, "skew_*: share mixed into the second one.")
    temperature: float = option(1.0, "T of both softmaxes. The loss is times T^2.")
    temperature_schedule: str = option(
        "constant", "How T changes to --final_temperature.", choices=SCHEDULES
    )
    final_temperature: float = option(1.0, "T at the end.")
    kd_alpha: float = option(0.9, "Share of the divergence; rest: cross-entropy.")
    top_k: int = option(0, "Compare the teacher's k best tokens. 0: all.")
    hidden_loss_weight: float = option(0.0, "Weight of a loss on hidden states.")
    hidden_loss_type: str = option("mse", "That loss, after projections.", choices=HIDDEN_LOSSES)
    layer_mapping: str | None = option(None, "Pairs student:teacher of layers: 1:3,2:6.")
    attn_relation_weight: float = option(0.0, "Weight of MiniLM's relations of q, k, v.")
    chunk_size: int = option(0, "Tokens with logits in memory. 0: it depends.")
    vocab_policy: str = option(
        "common", "Compare common tokens, or refuse others.", choices=VOCAB_POLICIES
    )


@dataclass
class GenerationArguments:
    """Text that the models write during training."""

    lmbda: float = option(0.0, "Share of batches that the student writes (GKD).")
    seq_kd: bool = option(False, "The teacher writes the other batches.")
    max_new_tokens: int = option(64, "Tokens to write.")


APPLICATION = Application(
    script="run_distill.py",
    summary="Distil a teacher into a smaller student. Without models and data this is a\n"
    "demonstration that needs no network. cache_teacher writes a teacher's\n"
    "probabilities to files. More in docs/distillation.md.",
    example="  torchrun --nproc_per_node 2 run_distill.py --deepspeed configs/zero3.json \\\n"
    "      --teacher_model_name_or_path path/to/teacher \\\n"
    "      --init_student_from_teacher best:6 --train_file train.jsonl \\\n"
    "      --do_train --output_dir output/student",
    extra="distill",
    packages=("datasets", "evaluate", "matplotlib", "sacrebleu", "sentencepiece"),
    groups={
        "student": ModelArguments,
        "teacher": TeacherArguments,
        "loss": LossArguments,
        "text that the models write": GenerationArguments,
        "examples": ExampleArguments,
        "data and output": DataArguments,
    },
    commands=("cache_teacher",),
)
