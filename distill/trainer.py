"""`DistillationTrainer`: transformers' Seq2SeqTrainer with a loss that compares a student with its
teacher.

[Note: normalisation] Losses are summed over the valid tokens of this rank's micro-batch. The sum is
divided by the valid tokens of the whole step (all micro-batches, all ranks), and multiplied by the
number of ranks, because engines and DDP average gradients. The Trainer must not divide by the
accumulation as well: `loss_is_scaled_for_ga` prevents that."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.trainer_utils import EvalLoopOutput

from distill import on_policy, vocabulary
from distill.batch import Batch, target_mask
from distill.cache import CacheError, TeacherCache, tokenizer_hash
from distill.config import DistillationConfig
from distill.fused import (
    Recipe,
    SharedTokens,
    StoredTeacher,
    Targets,
    TokenLosses,
    fused_head_loss,
    logits_loss,
)
from distill.heads import install_task_head, is_final
from distill.hidden import (
    AttentionRecorder,
    HiddenMatch,
    layers_and_width,
    parse_layer_mapping,
    relation_heads,
    relation_loss,
)
from distill.losses import Divergence
from distill.teacher import LiveTeacher, Observed, load_model, teacher_ds_config

# name of the submodule of the student that is trained with it and never exported
PROJECTIONS = "distillation"
_LOGGED = ("ce_loss", "kd_loss", "hidden_loss", "relation_loss")
_HELD_OUT = 6  # columns of the statistics of each held-out example


class DistillationTrainer(Seq2SeqTrainer):
    """Trains `model` to predict its data and to agree with `teacher_model`. Both may be sharded.

    Args: those of `Seq2SeqTrainer`, and
        teacher_model: a causal or encoder-decoder language model. Default:
        `args.teacher_model_name_or_path` is loaded.
            No teacher is needed with a teacher cache, or with `kd_alpha` 0 (plain training).
        teacher_processing_class: the teacher's tokenizer. Default: `processing_class`.

    Logs have `ce_loss` and `kd_loss` (nats per token, with the factor T^2). Evaluation gives
    `eval_loss` (cross-entropy), `eval_ppl`, `eval_kd_loss`, `eval_teacher_ce` and
    `eval_top1_agreement`. These are exact means over tokens on any number of ranks.

    Raises:
        ValueError: arguments exclude each other. VocabularyError: the tokenizers do not go
        together.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        teacher_model: PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        **options: object,
    ):
        self._shifted = not model.config.is_encoder_decoder
        self._student_head = install_task_head(model, "student")
        self._fused: bool | None = None if self._student_head is not None else False
        live = args.needs_teacher() and not args.teacher_cache
        if teacher_model is None and args.teacher_model_name_or_path and live:
            teacher_model = load_model(args.teacher_model_name_or_path)
        if teacher_model is None and live:
            raise ValueError(
                "there is no teacher: give teacher_model_name_or_path or teacher_cache, or "
                "kd_alpha 0"
            )
        if (args.lmbda or args.seq_kd) and processing_class is None:
            raise ValueError("lmbda and seq_kd write text: give processing_class, the tokenizer")
        self._recipe = self._make_recipe(
            model, teacher_model, args, processing_class, teacher_processing_class
        )
        self._prepare_inner_losses(model, teacher_model, args)
        super().__init__(model=model, args=args, processing_class=processing_class, **options)
        self.model_accepts_loss_kwargs = (
            True  # otherwise the Trainer does not count the tokens of the step
        )
        self._loss_shifts_labels = self._shifted
        self._recipe = self._recipe.to(self.args.device)
        self.teacher = (
            None if teacher_model is None else self.place_teacher(teacher_model, self.args)
        )
        self.cache = self._open_cache() if self.args.teacher_cache and self.args.kd_alpha else None
        self.seconds_evaluating = 0.0  # during training
        self._sums = torch.zeros(len(_LOGGED) + 1, dtype=torch.float64)

    # -- construction

    def _make_recipe(self, model, teacher_model, args, tokenizer, teacher_tokenizer) -> Recipe:
        divergence = Divergence(args.loss_type, args.beta, args.skew_alpha)
        self._replacement = None
        recipe = Recipe(
            args.kd_alpha, divergence, args.temperature, args.top_k, chunk_size=args.chunk_size
        )
        if teacher_model is None or args.loss_type == "uld":
            return recipe
        rows = _head_rows(model), _head_rows(teacher_model)
        if tokenizer is None:
            alignment = vocabulary.align_rows(*rows)
        else:
            other = teacher_tokenizer or tokenizer
            replacement = next(
                (i for i in (other.unk_token_id, other.eos_token_id) if i is not None), None
            )
            alignment = vocabulary.align(
                tokenizer.get_vocab(), other.get_vocab(), *rows, args.vocab_policy, replacement
            )
        self._replacement = alignment.replacement
        return replace(recipe, shared=alignment.shared, teacher_labels=alignment.teacher_labels)

    def _prepare_inner_losses(self, model, teacher_model, args) -> None:
        """Make projections and attention recorders, if losses inside of the models are
        configured.
        """
        self._recorders: tuple[AttentionRecorder, AttentionRecorder] | None = None
        self._matches_hidden = args.hidden_loss_weight > 0
        self._to_match: tuple[Batch, Observed] | None = None
        if not (self._matches_hidden or args.attn_relation_weight):
            return
        if teacher_model is None:
            raise ValueError(
                "hidden_loss_weight and attn_relation_weight need a teacher_model_name_or_path"
            )
        student, teacher = (layers_and_width(one.config) for one in (model, teacher_model))
        self._pairs = parse_layer_mapping(args.layer_mapping, student[0], teacher[0])
        if self._matches_hidden:
            match = HiddenMatch(self._pairs, student[1], teacher[1], args.hidden_loss_type)
            model.add_module(PROJECTIONS, match.to(device=model.device, dtype=torch.float32))
            # The projections run inside of the student's forward, because DDP and engines expect
            # all parameters there.
            model.register_forward_hook(self._match_hidden_states)
        if args.attn_relation_weight:
            self._recorders = (
                AttentionRecorder(model, "student"),
                AttentionRecorder(teacher_model, "teacher"),
            )

    @staticmethod
    def place_teacher(teacher_model: PreTrainedModel, args: DistillationConfig) -> LiveTeacher:
        """Freeze the teacher, and give it its own engine, or put it on a device, as the arguments
        say.
        """
        if args.deepspeed or args.teacher_deepspeed:
            return LiveTeacher(teacher_model, args.device, teacher_ds_config(args, teacher_model))
        return LiveTeacher(teacher_model, torch.device(args.teacher_device or args.device))

    def _open_cache(self) -> TeacherCache:
        args, cache = self.args, TeacherCache(self.args.teacher_cache)
        tokenizer = None if self.processing_class is None else tokenizer_hash(self.processing_class)
        cache.check(temperature=args.temperature, top_k=args.top_k or None, tokenizer=tokenizer)
        rows, tokens = _head_rows(self.model), cache.description.tokens
        if tokens > rows:
            raise CacheError(
                f"teacher_cache is over {tokens} tokens, but the student's head has only {rows} "
                "rows"
            )
        shared = None if tokens == rows else SharedTokens(slice(0, tokens), slice(0, tokens))
        self._recipe = replace(self._recipe, shared=shared)
        return cache

    # -- the loss

    def _batch(self, inputs: Mapping[str, torch.Tensor]) -> Batch:
        if not self._shifted and "decoder_input_ids" not in inputs:
            ids = self.model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
            inputs = {**inputs, "decoder_input_ids": ids}
        return Batch.of(inputs, self._shifted)

    def _match_hidden_states(self, student: nn.Module, args: tuple, output: Mapping) -> Mapping:
        """Forward hook of the student: adds the loss on hidden states to the output of a training
        step.
        """
        if self._to_match is None:
            return output
        batch, observed = self._to_match
        match = getattr(student, PROJECTIONS)
        ours = output.get("decoder_hidden_states") or output["hidden_states"]
        # A plain dict: DDP rebuilds the output, and transformers' output classes would refuse the
        # new key then.
        return {
            **output,
            "hidden_loss": match(ours, observed.hidden_states, batch.rows, batch.teacher_rows),
        }

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return this rank's share of the step's mean loss per token, times the number of ranks.

        See the note above.
        """
        batch = self._batch(inputs)
        progress = self.state.global_step / max(1, self.state.max_steps)
        recipe = replace(self._recipe, temperature=self.args.temperature_at(progress))
        stored = None if self.cache is None else self.cache.targets(inputs, batch)
        total, losses, inner = self._distil(model, batch, recipe, stored)
        sums = [
            losses.ce.sum(),
            losses.kd.sum(),
            *inner.values(),
            torch.tensor(float(len(batch.rows))),
        ]
        self._sums += torch.stack([part.detach().double().cpu() for part in sums])
        total = total + self.args.hidden_loss_weight * inner["hidden"]
        total = total + self.args.attn_relation_weight * inner["relation"]
        tokens = len(batch.rows) if num_items_in_batch is None else num_items_in_batch
        loss = total / tokens * self._ranks_averaged(num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def _ranks_averaged(self, num_items_in_batch: object) -> int:
        counted_over_ranks = (
            num_items_in_batch is not None and self.args.average_tokens_across_devices
        )
        return self.accelerator.num_processes if counted_over_ranks else 1

    def _distil(
        self, model: nn.Module, batch: Batch, recipe: Recipe, stored: StoredTeacher | None = None
    ) -> tuple[torch.Tensor, TokenLosses, dict[str, torch.Tensor]]:
        """Return the sum of the tokens' losses, the losses of each token, and the sums of the inner
        losses.
        """
        if self._fused is None:
            self._fused = self._try_head(model, batch)
        observed = self._observe(batch)
        training = torch.is_grad_enabled()
        matching = training and self._matches_hidden
        # With a cache, models would ignore where packed documents begin.
        options = {"use_cache": False, "output_hidden_states": matching}
        self._to_match = (batch, observed) if matching else None
        results: list = []

        def use_teacher(loss, *states):
            def use(teacher) -> None:
                results.extend(
                    loss(*states, Targets(batch.labels, teacher, batch.has_teacher), recipe)
                )

            if observed is None:
                use(stored)
            else:
                self.teacher.within(observed, use, batch.labels.device)

        def in_student_head(hidden, weight, bias):
            use_teacher(fused_head_loss, hidden.flatten(0, 1)[batch.rows], weight, bias)
            return results[0].view(1)

        def run():
            if not self._fused:
                output = model(**batch.student, **options)
                use_teacher(logits_loss, output["logits"].flatten(0, 1)[batch.rows])
                return output, results[0]
            with self._student_head.doing(in_student_head):
                output = model(**batch.student, **options)
            return output, output["logits"].squeeze()

        if self._recorders is None or not training:
            output, total = run()
            recorded = None
        else:
            with self._recorders[0].recording(
                [pair.student - 1 for pair in self._pairs if pair.student]
            ) as recorded:
                output, total = run()
        self._to_match = None
        return total, results[1], self._inner_losses(batch, output, recorded, observed)

    def _try_head(self, model: nn.Module, batch: Batch) -> bool:
        mode = model.training
        model.eval()
        final = is_final(self._student_head, model, batch.student, "student")
        model.train(mode)
        return final

    def _observe(self, batch: Batch) -> Observed | None:
        if self.teacher is None or (torch.is_grad_enabled() and not self.args.needs_teacher()):
            return None
        inputs = batch.teacher
        if self._replacement is not None:
            known = self._recipe.teacher_labels.to(inputs["input_ids"].device)
            for name in {"input_ids", "decoder_input_ids"} & inputs.keys():
                unknown = known[inputs[name]] < 0
                inputs = {**inputs, name: inputs[name].masked_fill(unknown, self._replacement)}
        training = torch.is_grad_enabled()
        recorder = self._recorders[1] if self._recorders is not None and training else None
        layers = (
            [pair.teacher - 1 for pair in self._pairs if pair.student and pair.teacher]
            if recorder
            else ()
        )
        return self.teacher.observe(
            inputs, batch.teacher_rows, training and self._matches_hidden, recorder, layers
        )

    def _inner_losses(self, batch, output, recorded, observed) -> dict[str, torch.Tensor]:
        zero = torch.zeros((), device=batch.labels.device)
        losses = {"hidden": output.get("hidden_loss", zero), "relation": zero}
        if recorded is not None:
            pairs = [pair for pair in self._pairs if pair.student and pair.teacher]
            for pair in pairs:
                student, teacher = recorded[pair.student - 1], observed.attentions[pair.teacher - 1]
                heads = relation_heads(
                    [part.shape[-1] for part in (*student, *teacher)], _heads(self.model.config)
                )
                loss = relation_loss(student, teacher, heads, batch.visible())
                losses["relation"] = losses["relation"] + loss.flatten()[batch.rows].sum() / len(
                    pairs
                )
        return losses

    # -- generated batches

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """Return the step's micro-batches.

        `lmbda` and `seq_kd` replace some of them before tokens are counted.
        """
        args: DistillationConfig = self.args
        if not (args.lmbda or args.seq_kd):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = []
        for number, inputs in enumerate(itertools.islice(epoch_iterator, num_batches)):
            writer = on_policy.writer_of(
                self.state.global_step, number, args.seed, args.lmbda, args.seq_kd
            )
            samples.append(self._written_by(writer, inputs) if writer else inputs)
        return samples, self._get_num_items_in_batch(samples, device)

    def _written_by(
        self, writer: str, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        model = self.model if writer == "student" else self.teacher.model
        inputs = self._prepare_inputs(inputs)
        tokenizer = self.processing_class
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        return on_policy.rewrite(
            model, inputs, self.args.max_new_tokens, pad, end, sample=writer == "student"
        )

    # -- counting

    def _get_num_items_in_batch(
        self, batch_samples: list, device: torch.device
    ) -> torch.Tensor | int | None:
        """Return the number of predicted labels over all micro-batches of the step and all
        ranks.
        """
        if not batch_samples:
            return None
        count = sum(
            target_mask(batch["labels"], self._shifted).sum() for batch in batch_samples
        ).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the training loss: means over the tokens of all ranks since the last
        log.
        """
        if "loss" in logs and self._sums[-1] > 0:
            sums = self.accelerator.reduce(
                self._sums.to(self.args.device, torch.float32), "sum"
            ).tolist()
            used = {
                "hidden_loss": self._matches_hidden,
                "relation_loss": self._recorders is not None,
            }
            used["kd_loss"] = self.args.kd_alpha > 0
            logs |= {
                name: sums[i] / sums[-1] for i, name in enumerate(_LOGGED) if used.get(name, True)
            }
            self._sums.zero_()
        super().log(logs, start_time)

    # -- evaluation

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, *args, **kwargs
    ) -> EvalLoopOutput:
        """Score every example once, by tokens.

        `predict` with `predict_with_generate` generates instead.
        """
        self.gather_function = self.accelerator.gather_for_metrics
        if self._generates(description):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, *args, **kwargs
            )
        self._scores = True
        start = time.perf_counter()
        try:
            output = super().evaluation_loop(dataloader, description, False, *args, **kwargs)
        finally:
            self._scores = False
        if self.is_in_train:
            self.seconds_evaluating += time.perf_counter() - start
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = {
            f"{prefix}_{name}": value
            for name, value in _held_out_metrics(output.predictions).items()
        }
        return output._replace(predictions=None, metrics={**output.metrics, **metrics})

    _scores = False

    def _generates(self, description: str) -> bool:
        return self.args.predict_with_generate and description == "Prediction"

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **generation):
        if not self._scores:
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **generation
            )
        inputs = self._prepare_inputs(inputs)
        batch = self._batch(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            # With different tokenizers, labels and most probable tokens cannot be compared.
            comparable = self.teacher is not None and self.args.loss_type != "uld"
            recipe = replace(self._recipe, with_agreement=comparable)
            _, losses, _ = self._distil(model, batch, recipe)
        ones = torch.ones_like(losses.ce)
        columns = [
            losses.ce,
            losses.kd,
            losses.teacher_ce,
            losses.agreement,
            ones,
            losses.agreement.isfinite().float(),
        ]
        sums = ones.new_zeros(batch.size, _HELD_OUT)
        sums.index_add_(0, batch.examples, torch.stack(columns, dim=1).nan_to_num(0.0))
        return None, sums, None

    # -- saving

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Save the student without its projections.

        A checkpoint has them in a file of their own, for a resumption.
        """
        if self._matches_hidden:
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            own = {
                name: value
                for name, value in state_dict.items()
                if name.startswith(PROJECTIONS + ".")
            }
            state_dict = {name: value for name, value in state_dict.items() if name not in own}
            if own and self.args.should_save and output_dir not in (None, self.args.output_dir):
                Path(output_dir).mkdir(parents=True, exist_ok=True)
                save_file(
                    {name: value.contiguous() for name, value in own.items()},
                    _projections_file(output_dir),
                )
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._matches_hidden:
            self.model.load_state_dict(
                load_file(_projections_file(resume_from_checkpoint)), strict=False
            )


def _projections_file(folder: str) -> Path:
    return Path(folder, "distillation.safetensors")


def _head_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the model's head, which is the width of its logits."""
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    return model.config.get_text_config().vocab_size if rows is None else rows


def _heads(config: object) -> int:
    return config.get_text_config().num_attention_heads


def _held_out_metrics(sums: np.ndarray) -> dict[str, float]:
    """Return means over tokens from the sums of each example."""
    ce, kd, teacher_ce, agreement, tokens, compared = (
        np.asarray(sums, dtype=np.float64).sum(0).tolist()
    )
    metrics = {
        "loss": ce / tokens,
        "ce_loss": ce / tokens,
        "ppl": math.exp(min(ce / tokens, 700)),
        "tokens": int(tokens),
    }
    if kd:
        metrics["kd_loss"] = kd / tokens
    if compared:
        metrics |= {"teacher_ce": teacher_ce / compared, "top1_agreement": agreement / compared}
    return metrics
