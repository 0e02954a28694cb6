"""`DistillationTrainer`: transformers' Seq2SeqTrainer with a loss that compares a student with its
teacher.

`compute_loss` comes first, then what it calls, then what else the Trainer needs: batches that
models write, counting, evaluation, saving. The first note of `distill.objective` explains how the
losses of tokens become the loss of a step. The Trainer must not divide by the accumulation as
well, which `loss_is_scaled_for_ga` prevents."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import EvalLoopOutput

from distill import on_policy, vocabulary
from distill.batch import Batch, isolates_documents, target_mask, with_decoder_inputs
from distill.cache import CacheError, TeacherCache, example_keys, tokenizer_hash
from distill.config import DistillationConfig
from distill.data import Collator, CountingCollator
from distill.examples import with_tokens
from distill.fused import Recipe, SharedTokens, StoredTeacher
from distill.heads import TaskHead, install_task_head, is_final
from distill.layers import PROJECTIONS, LayerLosses
from distill.losses import Divergence
from distill.objective import BatchLosses, HeadLoss, LossSums, objective, share_of_step
from distill.teacher import (
    LiveTeacher,
    Observed,
    load_teacher,
    require_same_kind,
    teacher_ds_config,
)
from translation.records import InputError
from translation.tokenizer import pad_token_id, token_id


class DistillationTrainer(Seq2SeqTrainer):
    """Trains `model` to predict its data and to agree with `teacher_model`. Both may be sharded.

    Args: the arguments of `Seq2SeqTrainer`, and
        teacher_model: a causal or encoder-decoder language model. Default:
        `args.teacher_model_name_or_path` is loaded.
            No teacher is needed with a teacher cache, or with `kd_alpha` 0 (plain training).
        teacher_processing_class: the teacher's tokenizer. Default: `processing_class`.

    Logs have `ce_loss` and `kd_loss` (nats per token, with the factor T^2). Evaluation gives
    `eval_loss` (cross-entropy), `eval_ppl`, `eval_kd_loss`, `eval_teacher_ce` and
    `eval_top1_agreement`. These are exact means over tokens on any number of ranks.

    Raises:
        ValueError: arguments exclude each other. VocabularyError: the tokenizers do not match.
    """

    args: DistillationConfig
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | None
    loss_is_scaled_for_ga = True

    # -- the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return this rank's share of the step's mean loss per token, times the number of ranks."""
        args = self.args
        batch = self._parts(model, inputs)
        progress = self.state.global_step / max(1, self.state.max_steps)
        recipe = replace(self._recipe, temperature=args.temperature_at(progress))
        teacher = self._observe(batch)
        if teacher is None and self.cache is not None:
            teacher = self.cache.targets(inputs, batch)
        losses = self._batch_losses(model, batch, recipe, teacher)
        self._sums.add(losses)
        total = objective(losses, args.hidden_loss_weight, args.attn_relation_weight)
        if num_items_in_batch is None:
            loss = share_of_step(total, len(batch.rows), ranks=1)
        else:
            counts_all_ranks = args.average_tokens_across_devices
            ranks = self.accelerator.num_processes if counts_all_ranks else 1
            loss = share_of_step(total, num_items_in_batch, ranks)
        return (loss, {}) if return_outputs else loss

    def _parts(self, model: nn.Module, inputs: Mapping[str, Any]) -> Batch:
        """Return the parts of a batch. The first packed one shows whether the models isolate
        documents.
        """
        if "position_ids" in inputs and self._isolates is None:
            ours = isolates_documents(model, self.args.device, "student")
            self._isolates = ours and (self.teacher is None or self.teacher.isolates)
        inputs = with_decoder_inputs(inputs, self.model)
        return Batch.of(inputs, self._shifted, self._isolates is not False)

    def _observe(self, batch: Batch) -> Observed | None:
        """Run the teacher, if there is one and it is needed. In training it also records what the
        losses between layers need.
        """
        training = torch.is_grad_enabled()
        if self.teacher is None or (training and not self.args.needs_teacher()):
            return None
        inputs = self._as_the_teacher_reads(batch.teacher)
        if self._layers is None or not training:
            return self.teacher.observe(inputs, batch.teacher_rows)
        layers = self._layers
        return self.teacher.observe(
            inputs,
            batch.teacher_rows,
            layers.matches_hidden,
            layers.teacher_recorder,
            layers.teacher_layers,
        )

    def _as_the_teacher_reads(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the tokens that the teacher does not know."""
        known = self._recipe.teacher_labels
        if self._replacement is None or known is None:
            return dict(inputs)
        replaced = dict(inputs)
        for name in {"input_ids", "decoder_input_ids"} & inputs.keys():
            unknown = known.to(inputs[name].device)[inputs[name]] < 0
            replaced[name] = inputs[name].masked_fill(unknown, self._replacement)
        return replaced

    def _batch_losses(
        self,
        model: nn.Module,
        batch: Batch,
        recipe: Recipe,
        teacher: Observed | StoredTeacher | None,
    ) -> BatchLosses:
        """Run the student, and return its losses against the targets and the teacher."""
        layers = self._layers if torch.is_grad_enabled() else None
        head, head_loss = self._plain_head(model, batch), HeadLoss(batch, recipe, teacher)
        if layers is None or not isinstance(teacher, Observed):
            total, _ = _run_student(model, batch, head, head_loss)
            zero = torch.zeros((), device=batch.labels.device)
            return BatchLosses(total, head_loss.tokens, zero, zero)
        with layers.recording(batch, teacher) as attentions:
            total, output = _run_student(model, batch, head, head_loss, layers.matches_hidden)
        relation = layers.relation_loss(batch, attentions, teacher.attentions)
        hidden = output.get("hidden_loss", torch.zeros_like(relation))
        return BatchLosses(total, head_loss.tokens, hidden, relation)

    def _plain_head(self, model: nn.Module, batch: Batch) -> TaskHead | None:
        """The student's head, unless something comes after it. The first batch is needed to find
        out.
        """
        if not self._head_is_tested and self._student_head is not None:
            training = model.training
            model.eval()
            if not is_final(self._student_head, model, batch.student, "student"):
                self._student_head = None
            model.train(training)
        self._head_is_tested = True
        return self._student_head

    # -- construction

    def __init__(
        self,
        model: PreTrainedModel,
        teacher_model: PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ):
        args = args or DistillationConfig()
        live = args.needs_teacher() and not args.teacher_cache
        if teacher_model is None and args.teacher_model_name_or_path and live:
            teacher_model = load_teacher(args)
        if teacher_model is None and live:
            raise ValueError(
                "there is no teacher: give teacher_model_name_or_path or teacher_cache, or "
                "kd_alpha 0"
            )
        if teacher_model is not None:
            require_same_kind(model.config, teacher_model.config)
        if (args.lmbda or args.seq_kd) and processing_class is None:
            raise ValueError("lmbda and seq_kd write text: give processing_class, the tokenizer")
        self._shifted = not model.config.is_encoder_decoder
        self._student_head = install_task_head(model, "student")
        self._head_is_tested = False
        self._isolates: bool | None = None
        alignment = _align(model, teacher_model, args, processing_class, teacher_processing_class)
        self._replacement = alignment.replacement
        if teacher_model is not None and args.top_k:
            _require_shared(args.top_k, alignment.shared, _head_rows(model))
        recipe = Recipe(
            args.kd_alpha,
            Divergence(args.loss_type, args.beta, args.skew_alpha),
            args.temperature,
            args.top_k,
            alignment.shared,
            alignment.teacher_labels,
            args.chunk_size,
        )
        self._layers: LayerLosses | None = None
        if args.hidden_loss_weight > 0 or args.attn_relation_weight:
            if teacher_model is None:
                raise ValueError(
                    "hidden_loss_weight and attn_relation_weight need a teacher_model_name_or_path"
                )
            self._layers = LayerLosses(model, teacher_model, args)
        # Padding is masked, so without a tokenizer any token will do.
        padding = 0 if processing_class is None else pad_token_id(processing_class)
        other = teacher_processing_class if args.loss_type == "uld" else None
        encode = partial(with_tokens, args, processing_class, not self._shifted, other)
        train_dataset = encode(train_dataset, "train_dataset")
        settings = args.accelerator_config
        if isinstance(train_dataset, IterableDataset) and isinstance(settings, AcceleratorConfig):
            # Otherwise one rank reads for all, which needs batches of one length.
            settings.dispatch_batches = bool(settings.dispatch_batches)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or Collator(padding),
            train_dataset=train_dataset,
            eval_dataset=encode(eval_dataset, "eval_dataset"),
            processing_class=processing_class,
            **options,
        )
        # Otherwise the Trainer does not count the tokens of the step.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = self._shifted
        self._recipe = recipe.to(self.args.device)
        self.teacher: LiveTeacher | None = None
        if teacher_model is not None:
            self.teacher = self.place_teacher(teacher_model, self.args, self.args.overlap_teacher)
        self.cache: TeacherCache | None = None
        if self.args.teacher_cache and self.args.kd_alpha:
            self.cache = self._open_cache(self.args.teacher_cache)
        self.seconds_evaluating = 0.0  # during training
        self._scores = False
        self._sums = LossSums(self.args.device)
        # Who wrote the micro-batches since the last log; None: the data.
        self._writers: Counter[str | None] = Counter()

    @staticmethod
    def place_teacher(
        teacher_model: PreTrainedModel, args: DistillationConfig, overlaps: bool = False
    ) -> LiveTeacher:
        """Freeze the teacher, and give it its own engine, or put it on a device, as the arguments
        say. `overlaps`: beside a student on the same device.
        """
        if args.deepspeed or args.teacher_deepspeed:
            ds_config = teacher_ds_config(args, teacher_model)
            return LiveTeacher(teacher_model, args.device, ds_config, overlaps)
        device = torch.device(args.teacher_device or args.device)
        # Another device computes beside the student's anyway.
        overlaps = overlaps and device == args.device
        return LiveTeacher(teacher_model, device, overlaps=overlaps)

    def _open_cache(self, folder: str) -> TeacherCache:
        args, cache = self.args, TeacherCache(folder)
        tokenizer = None if self.processing_class is None else tokenizer_hash(self.processing_class)
        cache.check(temperature=args.temperature, top_k=args.top_k or None, tokenizer=tokenizer)
        if cache.description.sampling == "importance" and args.loss_type != "forward_kl":
            raise CacheError(
                f"teacher_cache {folder} holds sampled tokens, whose gradient is unbiased for "
                f"forward_kl only: use this loss_type instead of {args.loss_type}, or make a cache "
                "with --cache_sampling top_k"
            )
        rows, tokens = _head_rows(self.model), cache.description.tokens
        if tokens > rows:
            raise CacheError(
                f"teacher_cache is over {tokens} tokens, but the student's head has only {rows} "
                "rows"
            )
        shared = None if tokens == rows else SharedTokens(slice(0, tokens), slice(0, tokens))
        self._recipe = replace(self._recipe, shared=shared)
        if isinstance(self.train_dataset, Sized):
            quiet = args.disable_tqdm or args.process_index > 0
            examples = tqdm(
                cast(Iterable[Any], self.train_dataset),
                "finding examples in the cache",
                disable=quiet,
            )
            cache.require(example_keys(self.data_collator([each])) for each in examples)
        return cache

    # -- batches

    def get_train_dataloader(self) -> DataLoader:
        """Return the data loader of the Trainer. Its batches also carry, on the host, what the loss
        needs to know about them.
        """
        settings = self.args.accelerator_config
        dispatches = isinstance(settings, AcceleratorConfig) and settings.dispatch_batches
        if dispatches or isinstance(self.train_dataset, IterableDataset):
            # One rank reads for all, and accelerate can send tensors only.
            return super().get_train_dataloader()
        collate = self.data_collator
        with_keys = self.cache is not None
        self.data_collator = CountingCollator(collate, self._shifted, with_keys)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | int | None]:
        """Return the step's micro-batches, and the number of their targets.

        `lmbda` and `seq_kd` replace some of them before targets are counted.
        """
        args = self.args
        if not (args.lmbda or args.seq_kd):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = []
        for number, inputs in enumerate(itertools.islice(epoch_iterator, num_batches)):
            step = self.state.global_step
            writer = on_policy.writer_of(step, number, args.seed, args.lmbda, args.seq_kd)
            if writer:
                with on_policy.drawing(args.seed, step, number, args.process_index, device):
                    inputs = self._written_by(writer, inputs)
            samples.append(inputs)
            self._writers[writer] += 1
        return samples, self._get_num_items_in_batch(samples, device)

    def _written_by(self, writer: str, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        model, tokenizer, rewrite = self.model, self.processing_class, on_policy.rewrite
        if writer == "teacher" and self.teacher is not None:
            model, rewrite = self.teacher.model, partial(self.teacher.stream.call, rewrite)
        assert tokenizer is not None  # checked at construction
        batch = rewrite(
            model,
            self._prepare_inputs(inputs),
            self.args.max_new_tokens,
            pad_token_id(tokenizer),
            on_policy.end_tokens(model, token_id(tokenizer, "eos")),
            writer == "student",
            bool(self.args.deepspeed or self.args.teacher_deepspeed),
        )
        if self.teacher is not None:
            self.teacher.stream.wait()
        return batch

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> torch.Tensor | int | None:
        """Return the number of targets in all micro-batches of the step, on all ranks."""
        if not batch_samples:
            return None
        masks = [target_mask(batch["labels"], self._shifted) for batch in batch_samples]
        count = torch.stack([mask.sum() for mask in masks]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = cast(torch.Tensor, self.accelerator.gather(count)).sum()
        return count

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the training loss: means over the targets of all ranks since the last
        log.
        """
        if "loss" in logs and self._sums.batches:
            layers = self._layers
            unused = {
                "kd_loss": not self.args.kd_alpha,
                "hidden_loss": layers is None or not layers.matches_hidden,
                "relation_loss": layers is None or layers.teacher_recorder is None,
            }
            means = self._sums.pop_means(self.accelerator)
            _require_numbers(means, self.state.global_step)
            logs |= {name: mean for name, mean in means.items() if not unused.get(name)}
        if "loss" in logs and self._writers:
            batches = self._writers.total()
            logs["written_by_student"] = self._writers["student"] / batches
            logs["written_by_teacher"] = self._writers["teacher"] / batches
            self._writers.clear()
        super().log(logs, start_time)

    # -- evaluation

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        """Keep the dataset's order, as `TranslationTrainer` does."""
        return SequentialSampler(cast(Sized, eval_dataset))

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Score every example once, by tokens.

        `predict` with `predict_with_generate` generates instead.
        """
        self.gather_function = self.accelerator.gather_for_metrics
        if self.args.predict_with_generate and description == "Prediction":
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self._scores = True
        start = time.perf_counter()
        try:
            output = super().evaluation_loop(
                dataloader, description, False, ignore_keys, metric_key_prefix
            )
        finally:
            self._scores = False
        if self.is_in_train:
            self.seconds_evaluating += time.perf_counter() - start
        metrics = {
            f"{metric_key_prefix}_{name}": value
            for name, value in _held_out_metrics(np.asarray(output.predictions)).items()
        }
        return output._replace(predictions=None, metrics={**(output.metrics or {}), **metrics})

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """Return the sums of each example as its predictions, or generate (`evaluation_loop`)."""
        if not self._scores:
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
        batch = self._parts(model, self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            # With different tokenizers, labels and most probable tokens cannot be compared.
            comparable = self.teacher is not None and self.args.loss_type != "uld"
            recipe = replace(self._recipe, with_agreement=comparable)
            losses = self._batch_losses(model, batch, recipe, self._observe(batch)).tokens
        ones = torch.ones_like(losses.ce)
        columns = [
            losses.ce,
            losses.kd,
            losses.teacher_ce.nan_to_num(0.0),  # NaN if it is unknown
            losses.agreement.nan_to_num(0.0),
            ones,
            losses.teacher_ce.isfinite().float(),  # the teacher may not know the label
            losses.agreement.isfinite().float(),
        ]
        sums = ones.new_zeros(batch.size, len(columns))
        sums.index_add_(0, batch.examples, torch.stack(columns, dim=1))
        return None, sums, None

    # -- saving

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Save the student without its projections.

        A checkpoint has them in a separate file, so that training can resume.
        """
        if self._layers is not None and self._layers.matches_hidden:
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            projections = {
                name: value.contiguous()
                for name, value in state_dict.items()
                if name.startswith(PROJECTIONS + ".")
            }
            state_dict = {n: value for n, value in state_dict.items() if n not in projections}
            is_checkpoint = output_dir not in (None, self.args.output_dir)
            if projections and self.args.should_save and output_dir and is_checkpoint:
                Path(output_dir).mkdir(parents=True, exist_ok=True)
                save_file(projections, _projections_file(output_dir))
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._layers is not None and self._layers.matches_hidden:
            projections = load_file(_projections_file(resume_from_checkpoint))
            self.model.load_state_dict(projections, strict=False)


def _run_student(
    model: nn.Module,
    batch: Batch,
    head: TaskHead | None,
    head_loss: HeadLoss,
    with_hidden: bool = False,
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the sum of the losses of a batch's tokens, and the student's output.

    `head`: the student's, if its output is the logits. Then no logits of the whole batch exist.
    """
    # With a cache, models would ignore where packed documents begin.
    options = {"use_cache": False, "output_hidden_states": with_hidden}
    if head is None:
        output = model(**batch.student, **options)
        return head_loss.of_logits(output["logits"]), output
    with head.doing(head_loss.of_hidden_states):
        output = model(**batch.student, **options)
    return output["logits"].squeeze(), output


def _require_numbers(means: Mapping[str, float], step: int) -> None:
    """Raise InputError if a part of the loss is NaN. The Trainer's log would show it as 0."""
    if wrong := [name for name, mean in means.items() if math.isnan(mean)]:
        raise InputError(
            f"{', '.join(wrong)} was NaN since the last log, at step {step} or before: the teacher "
            "or the student predicts NaN, because its weights are damaged or its values overflow; "
            "resume from a checkpoint before this with a smaller --learning_rate, or with --bf16 "
            "in place of --fp16"
        )


def _projections_file(folder: str) -> Path:
    return Path(folder, "distillation.safetensors")


def _align(
    model: PreTrainedModel,
    teacher_model: PreTrainedModel | None,
    args: DistillationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
) -> vocabulary.Alignment:
    """Return the tokens over which student and teacher are compared. "uld" accepts any two."""
    if teacher_model is None or args.loss_type == "uld":
        return vocabulary.Alignment()
    rows, teacher_rows = _head_rows(model), _head_rows(teacher_model)
    if tokenizer is None:
        return vocabulary.align_rows(rows, teacher_rows)
    teacher_tokenizer = teacher_tokenizer or tokenizer
    replacement = token_id(teacher_tokenizer, "unk")
    if replacement is None:
        replacement = token_id(teacher_tokenizer, "eos")
    return vocabulary.align(
        tokenizer.get_vocab(),
        teacher_tokenizer.get_vocab(),
        rows,
        teacher_rows,
        args.vocab_policy,
        replacement,
    )


def _require_shared(top_k: int, shared: SharedTokens | None, rows: int) -> None:
    ids = torch.arange(rows)
    tokens = rows if shared is None else len(ids[shared.student])
    if top_k >= tokens:
        raise ValueError(
            f"top_k is {top_k}: it must be less than the {tokens} tokens that student and teacher "
            "share"
        )


def _head_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the model's head, which is the width of its logits."""
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    return model.config.get_text_config().vocab_size if rows is None else rows


def _held_out_metrics(sums: np.ndarray) -> dict[str, float]:
    """Return means over tokens from the sums of each example, (examples, 7)."""
    ce, kd, teacher_ce, agreement, tokens, known, compared = sums.astype(np.float64).sum(0).tolist()
    metrics = {
        "loss": ce / tokens,
        "ce_loss": ce / tokens,
        "ppl": math.exp(min(ce / tokens, 700)),
        "tokens": int(tokens),
    }
    if kd:
        metrics["kd_loss"] = kd / tokens
    if compared:
        metrics |= {
            "teacher_ce": teacher_ce / max(1, known),
            "top1_agreement": agreement / compared,
        }
    return metrics
