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
        None, "Layers that get one, or all-linear. Default: PEFT's for this kind of model."
    )
    merge_adapters: bool = option(False, "Save the student with its adapters merged, at the end.")


@dataclass
class ModelArguments(AdapterArguments, LoadingArguments):
    """The student and its tokenizer. --teacher_model_name_or_path names the teacher."""

    model_name_or_path: str | None = option(None, "Student: a model folder or hub name.")
    student_config: str | None = option(
        None,
        "Configuration (folder, JSON file or hub name) of a new student, which starts from "
        "scratch.",
    )
    init_student_from_teacher: str | None = option(
        None,
        "Layers of the teacher that become the student: 0,5,11, or best:3 for the three that "
        "change their input most.",
    )
    tokenizer_name: str | None = option(
        None, "The student's tokenizer. Default: its model's, otherwise the teacher's."
    )


@dataclass
class DataArguments:
    """The data, and what is written."""

    train_file: str | None = option(
        None, "Training data: .json, .jsonl, .csv, .tsv, .parquet, .txt, or a dataset's name."
    )
    validation_file: str | None = option(None, "Held-out data, in the same formats.")
    test_file: str | None = option(None, "Data for --do_predict, in the same formats.")
    streaming: bool = option(False, "Read training data while it is used (needs --max_steps).")
    max_train_tokens: int | None = option(None, "Use only this many training tokens.")
    max_eval_samples: int | None = option(None, "Use only this many validation blocks.")
    teacher_steps: int | None = option(
        None,
        "Training steps of the demonstration's teacher. Default: 1200, and no more than "
        "--max_steps.",
    )
    export_dtype: str = option(
        "bfloat16", "Dtype of the exported student.", choices=("bfloat16", "float16", "float32")
    )
    overwrite_output_dir: bool = option(False, "Allow an output folder that contains files.")


@dataclass
class ExampleArguments:
    """How records become examples."""

    source_column: str | None = option(
        None,
        "Key of what an encoder-decoder model reads. A dot means a nested object: translation.en.",
    )
    target_column: str | None = option(None, "Key of the text that it learns to write.")
    source_prefix: str | None = option(
        None,
        "Text to put before every source, as in the teacher's training: translate English to "
        "German:",
    )
    max_length: int = option(512, "Tokens in a block, or without packing in an example.")
    packing: bool = option(
        True,
        "Pack several examples, which cannot attend to each other, into a block (causal models).",
    )


@dataclass
class TeacherArguments:
    """The teacher, or a cache of what it says."""

    teacher_model_name_or_path: str | None = option(None, "Teacher: a model folder or a hub name.")
    teacher_revision: str = option("main", "Branch, tag or commit of the teacher on the hub.")
    teacher_trust_remote_code: bool = option(False, "Allow code of the teacher to run here.")
    teacher_attn_implementation: str | None = option(None, "As --attn_implementation.")
    teacher_dtype: str | None = option(
        None, "Dtype of the loaded teacher. Default: its file's (auto).", choices=DTYPES
    )
    teacher_deepspeed: str | None = option(
        None,
        "The teacher's ds_config. Default: stage and precision of --deepspeed, parameters "
        "offloaded.",
    )
    teacher_device: str | None = option(
        None,
        "Device of a teacher that is not sharded, such as cuda:1. Default: the student's device.",
    )
    overlap_teacher: bool = option(
        False,
        "Run the teacher's forward beside the student's, on an accelerator with memory for both.",
    )
    teacher_load_in_4bit: bool = option(
        False, "Quantize the teacher's linear layers to NF4 (bitsandbytes) while it is loaded."
    )
    teacher_load_in_8bit: bool = option(
        False, "Quantize the teacher's linear layers to LLM.int8 while it is loaded."
    )
    teacher_cache: str | None = option(
        None, "Folder written by cache_teacher. It replaces the teacher."
    )
    cache_sampling: str = option(
        "top_k",
        "What cache_teacher stores: the --top_k most probable tokens, or an unbiased sample "
        "(for --loss_type forward_kl).",
        choices=SAMPLINGS,
    )

    def of_teachers_hub(self, hub: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The options with which transformers finds the teacher's files, on top of `hub`."""
        own = {"revision": self.teacher_revision}
        return {**(hub or {}), **own, "trust_remote_code": self.teacher_trust_remote_code}


@dataclass
class LossArguments:
    """What the student learns from the teacher."""

    loss_type: str = option(
        "forward_kl", "Divergence between student and teacher.", choices=LOSS_TYPES
    )
    beta: float = option(0.5, "Weight of the teacher in generalised JSD, above 0 and below 1.")
    skew_alpha: float = option(
        0.1,
        "Share of the first distribution that a skew loss mixes into the second, from 0 to below "
        "1.",
    )
    temperature: float = option(
        1.0, "Temperature T of both softmaxes. The loss is multiplied by T^2."
    )
    temperature_schedule: str = option(
        "constant", "How T changes to --final_temperature.", choices=SCHEDULES
    )
    final_temperature: float = option(1.0, "T at the end, unless the schedule is constant.")
    kd_alpha: float = option(
        0.9,
        "loss = (1 - kd_alpha) cross-entropy + kd_alpha divergence. With 0 no teacher is needed.",
    )
    top_k: int = option(
        0,
        "Compare the teacher's k most probable tokens, and all others as one token. 0: all tokens.",
    )
    hidden_loss_weight: float = option(0.0, "Weight of the loss on hidden states.")
    hidden_loss_type: str = option(
        "mse", "Loss on hidden states, after a learned projection.", choices=HIDDEN_LOSSES
    )
    layer_mapping: str | None = option(
        None,
        "Pairs student:teacher of layers to match, such as 1:3,2:6 (0: embeddings). Default: "
        "evenly spread.",
    )
    attn_relation_weight: float = option(0.0, "Weight of MiniLM's relations of q, k and v.")
    chunk_size: int = option(
        0, "Tokens whose logits are in memory at a time. 0: depends on the size of the vocabulary."
    )
    vocab_policy: str = option(
        "common",
        "common: compare the ids that both tokenizers know. strict: reject vocabularies that "
        "differ.",
        choices=VOCAB_POLICIES,
    )


@dataclass
class GenerationArguments:
    """Text that the models write during training."""

    lmbda: float = option(
        0.0, "Fraction of batches that the student generates (GKD, arXiv 2306.13649)."
    )
    seq_kd: bool = option(
        False, "Let the teacher generate the other batches (sequence-level distillation)."
    )
    max_new_tokens: int = option(64, "Tokens to generate for --lmbda and --seq_kd.")


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
