"""The teacher: a frozen model, sharded by its own engine without an optimizer, or whole on one
device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

import distill.minicodformer  # noqa: F401 - registers its classes
import zero
from distill.batch import isolates_documents
from distill.config import DistillationConfig
from distill.fused import HeadTeacher, LogitsTeacher
from distill.heads import Result, Task, TaskHead, install_task_head, is_final
from distill.hidden import Attention, AttentionRecorder
from distill.options import TeacherArguments
from translation.model import options_of_model
from translation.records import InputError, required
from zero.comm.communicator import apart
from zero.device import compute_stream, is_accelerator, new_stream


def load_model(
    name: str, hub: Mapping[str, object] | None = None, **options: object
) -> PreTrainedModel:
    """Load a causal or encoder-decoder language model. `hub`: options of `from_pretrained` for the
    configuration too. `options`: for the model alone.

    With ZeRO-3, transformers builds it inside `zero.Init`.
    """
    config = AutoConfig.from_pretrained(name, **(hub or {}))
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # transformers 4 would load in float32.
    return kind.from_pretrained(name, config=config, **{"dtype": "auto", **(hub or {}), **options})


def load_teacher(
    args: TeacherArguments, hub: Mapping[str, object] | None = None, **options: object
) -> PreTrainedModel:
    """Load the teacher that the arguments name, as they say. `hub`: options for all of its files.
    `options`: for the model.
    """
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    given = options_of_model(args.teacher_attn_implementation, args.teacher_dtype)
    return load_model(name, args.of_teachers_hub(hub), **given, **options)


def require_same_kind(student: PretrainedConfig, teacher: PretrainedConfig) -> None:
    """Raise ValueError if one model is causal and the other an encoder-decoder."""
    if student.is_encoder_decoder != teacher.is_encoder_decoder:
        kinds = [
            "an encoder-decoder" if each.is_encoder_decoder else "a causal model"
            for each in (student, teacher)
        ]
        raise ValueError(
            f"the student ({student.model_type}) is {kinds[0]} and the teacher "
            f"({teacher.model_type}) {kinds[1]}: take two of one kind"
        )


def teacher_ds_config(args: DistillationConfig, teacher: PreTrainedModel) -> dict:
    """Return the teacher's ds_config: the file of `--teacher_deepspeed`, or one with the student's
    stage and precision.
    """
    source = args.teacher_deepspeed or args.deepspeed or {}
    given = (
        source if isinstance(source, dict) else json.loads(Path(source).read_text(encoding="utf-8"))
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": args.fp16},
        "bf16": {"enabled": args.bf16},
    }
    for precision in ("fp16", "bf16"):
        enabled = given.get(precision, {}).get("enabled", False)
        config[precision]["enabled"] = getattr(args, precision) if enabled == "auto" else enabled
    section = {
        key: value for key, value in given.get("zero_optimization", {}).items() if value != "auto"
    }
    if not args.teacher_deepspeed:
        section.pop("offload_optimizer", None)
        if section.get("stage") == 3:
            # One group is prefetched while another is in use, so at most two groups are gathered at
            # a time, besides persistent parameters.
            threshold = 10 * teacher.config.get_text_config().hidden_size
            section.setdefault("stage3_param_persistence_threshold", threshold)
            pinned = torch.accelerator.is_available()
            section |= {
                "offload_param": {"device": "cpu", "pin_memory": pinned},
                "stage3_prefetch_bucket_size": 1,
                "stage3_max_reuse_distance": 0,
            }
    return (
        config
        | {key: given[key] for key in ("aio",) if key in given}
        | {"zero_optimization": section}
    )


LivePredictions = HeadTeacher | LogitsTeacher


class TeacherStream:
    """Where the teacher computes: in the current stream, which is the student's, or beside it.

    Then its engine does everything in a stream of its own. Allocators reuse memory within a stream,
    so a weight that is gathered in one and freed in the other could be overwritten too early.
    """

    def __init__(self, device: torch.device, beside: bool):
        self._device = device
        self._own = new_stream(device) if beside and is_accelerator(device) else None

    def call(self, function: Callable[..., Result], *given: Any) -> Result:
        """Call a function that runs the teacher. It begins after all that the student's stream has
        been given. That stream must `wait` before it uses the result.
        """
        if self._own is None:
            return function(*given)
        student = compute_stream(self._device)
        self._own.wait_stream(student)
        _keep_for(self._own, given)
        with self._own:
            result = function(*given)
        _keep_for(student, result)
        return result

    def wait(self) -> None:
        """Let the student's stream wait for the teacher."""
        if self._own is not None:
            compute_stream(self._device).wait_stream(self._own)

    def run_head(self, head: TaskHead, task: Task[Result], hidden: torch.Tensor) -> Result:
        """`head.run(task, hidden)`. The task, which is the student's loss, runs in the student's
        stream.
        """
        if (own := self._own) is None:
            return head.run(task, hidden)
        student = compute_stream(self._device)

        def with_student(*given: Any) -> Result:
            with student:
                self.wait()
                result = task(*given)
            own.wait_stream(student)
            return result

        with own:
            return head.run(with_student, hidden)


def _keep_for(stream: torch.Stream, tensors: object) -> None:
    """Do not reuse the memory of these tensors before `stream` has done what it has been given when
    they are freed.
    """
    for each in tree_leaves(tensors):
        if isinstance(each, torch.Tensor):
            each.record_stream(stream)


class Observed(NamedTuple):
    """The teacher's results for a batch.

    Attributes: states: (N, H) the input of its head for the N targets, or their logits (N, V).
    head: its head; None if `states` are logits. hidden_states, attentions: of all positions, for
    the losses between layers. stream: must be waited for before they are used.
    """

    states: torch.Tensor
    head: TaskHead | None
    hidden_states: Sequence[torch.Tensor]
    attentions: Mapping[int, Attention]
    stream: TeacherStream

    def compute(
        self, function: Callable[[LivePredictions], Result], device: torch.device
    ) -> Result:
        """Return `function(predictions)`, with the teacher's predictions for the N targets.

        It runs in a call of the teacher's head, because there the engine has gathered its weight.
        """
        if self.head is None:
            self.stream.wait()
            return function(LogitsTeacher(self.states.to(device)))
        task = partial(_compute_in_head, function, device)
        return self.stream.run_head(self.head, task, self.states)


def _compute_in_head(
    function: Callable[[LivePredictions], Result],
    device: torch.device,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Result:
    return function(HeadTeacher(hidden, weight, bias, device))


def _first_predictions(predictions: LivePredictions) -> torch.Tensor:
    return predictions.chunk(slice(0, 16))


def _hidden_states(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The task of a head that leaves its input as it is."""
    return hidden


class LiveTeacher:
    """A frozen teacher that runs on each batch.

    Attributes: model: the plain model. engine: its engine, or the model itself. device, stream:
    where it computes."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        ds_config: dict | None = None,
        overlaps: bool = False,
    ):
        """Freeze `model` and place it: sharded as `ds_config` says, or whole on `device`.

        `overlaps`: on an accelerator, it computes beside the student.
        """
        self.model = model.eval().requires_grad_(False)
        self._head = install_task_head(model, "teacher")
        self._head_is_tested = self._is_checked = False
        self.engine: nn.Module
        if ds_config is not None:
            with apart() if overlaps and is_accelerator(device) else nullcontext():
                self.engine, *_ = zero.initialize(model=model, config=ds_config)
            self.engine.eval()
        else:
            # Quantized models are loaded where they run, and refuse to be moved.
            self.engine = self.model if self.model.device == device else cast(Any, model).to(device)
        self.device = device
        self.stream = TeacherStream(device, overlaps)

    @cached_property
    def isolates(self) -> bool:
        """Whether packed documents do not see each other. All ranks ask this together."""
        return self.stream.call(isolates_documents, self.engine, self.device, "teacher")

    @torch.no_grad()
    def observe(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        with_hidden: bool = False,
        recorder: AttentionRecorder | None = None,
        layers: Sequence[int] = (),
    ) -> Observed:
        """Run the teacher on a batch, and keep the predictions at `rows` (N,) of the flattened
        batch.

        If the head is plain, hidden states are kept instead of logits. `recorder` records the
        attention `layers`."""
        given = inputs, rows, with_hidden, recorder, layers
        observed = self.stream.call(self._observe, *given)
        if not self._is_checked:
            self._check(observed)
        return observed

    def _observe(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        with_hidden: bool,
        recorder: AttentionRecorder | None,
        layers: Sequence[int],
    ) -> Observed:
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        head = self._plain_head(inputs)
        with ExitStack() as stack:
            if head is not None:
                stack.enter_context(head.doing(_hidden_states))
            attentions = {}
            if recorder is not None:
                attentions = stack.enter_context(recorder.recording(layers))
            # With a cache, models would ignore where packed documents begin.
            output = self.engine(**inputs, use_cache=False, output_hidden_states=with_hidden)
        hidden_states = ()
        if with_hidden:
            hidden_states = output.get("decoder_hidden_states") or output["hidden_states"]
        states = output.logits.flatten(0, 1)[rows.to(self.device)]
        return Observed(states, head, hidden_states, attentions, self.stream)

    def _check(self, observed: Observed) -> None:
        """Raise InputError if the first batch's predictions are not finite. Later ones are not
        tested, because the host would wait for the device; the log notices them.
        """
        first = observed.compute(_first_predictions, self.device)
        if (first.isnan() | first.isposinf()).any():
            raise InputError(
                f"the teacher {self.model.name_or_path} predicts NaN or infinity: its weights are "
                "damaged, or its values overflow in 16 bits; try --bf16 in place of --fp16, or "
                "neither"
            )
        self._is_checked = True

    def _plain_head(self, inputs: dict[str, torch.Tensor]) -> TaskHead | None:
        """The head, unless something comes after it. The first batch is needed to find out."""
        if not self._head_is_tested and self._head is not None:
            if not is_final(self._head, self.engine, inputs, "teacher"):
                self._head = None
        self._head_is_tested = True
        return self._head
