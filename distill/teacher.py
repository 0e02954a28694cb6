"""The teacher: a frozen model, sharded by its own engine without an optimizer, or whole on one
device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import distill.minicodformer  # noqa: F401 - registers its classes
import zero
from distill.config import DistillationConfig
from distill.fused import HeadTeacher, LogitsTeacher, Teacher
from distill.heads import install_task_head, is_final
from distill.hidden import Attention, AttentionRecorder


def load_model(name: str, **options: object) -> PreTrainedModel:
    """Load a causal or encoder-decoder language model. `options` go to `from_pretrained`.

    With ZeRO-3, transformers builds it inside of `zero.Init`.
    """
    config = AutoConfig.from_pretrained(name)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_pretrained(name, config=config, **options)


def teacher_ds_config(args: DistillationConfig, teacher: PreTrainedModel) -> dict:
    """Return the teacher's ds_config: that of `--teacher_deepspeed`, else the student's stage and
    precision.

    It has no optimizer. At stage 3 the default offloads the parameters, and prefetches one group
    while one is in use. So at most two parameter groups are gathered at a time, besides persistent
    parameters."""
    source = args.teacher_deepspeed or args.deepspeed
    given = (
        source if isinstance(source, dict) else json.loads(Path(source).read_text(encoding="utf-8"))
    )
    config = {
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
    section.pop("offload_optimizer", None)
    if section.get("stage", 0) == 3 and not args.teacher_deepspeed:
        section |= {
            "offload_param": {"device": "cpu", "pin_memory": torch.accelerator.is_available()},
            "stage3_prefetch_bucket_size": 1,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": section.get(
                "stage3_param_persistence_threshold",
                10 * teacher.config.get_text_config().hidden_size,
            ),
        }
    return (
        config
        | {key: given[key] for key in ("aio",) if key in given}
        | {"zero_optimization": section}
    )


@dataclass
class Observed:
    """The teacher's results for a batch. `states`: (N, H) before its head, or (N, V) after it."""

    states: torch.Tensor
    hidden_states: Sequence[torch.Tensor] = ()
    attentions: Mapping[int, Attention] | None = None


class LiveTeacher:
    """A frozen teacher that runs on each batch.

    Attributes: model: the plain model. engine: its engine, or the model itself. device: where it
    computes."""

    def __init__(self, model: PreTrainedModel, device: torch.device, ds_config: dict | None = None):
        """Freeze `model` and place it: sharded as `ds_config` says, or whole on `device`."""
        self.model = model.eval().requires_grad_(False)
        self.head = install_task_head(model, "teacher")
        if ds_config is not None:
            self.engine, *_ = zero.initialize(model=model, config=ds_config)
            self.engine.eval()
        else:
            self.engine = model.to(device)
        self.device = device
        self.fused: bool | None = None if self.head is not None else False

    def to_device(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in inputs.items()}

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

        If the head is plain, hidden states are kept, and no logits. `recorder` records the
        attention `layers`."""
        inputs, rows = self.to_device(inputs), rows.to(self.device)
        if self.fused is None:
            self.fused = is_final(
                self.head,
                self.engine,
                {name: value[:1] for name, value in inputs.items()},
                "teacher",
            )
        attentions = None
        if recorder is None:
            output, states = self._read(inputs, with_hidden)
        else:
            with recorder.recording(layers) as attentions:
                output, states = self._read(inputs, with_hidden)
        hidden = ()
        if with_hidden:
            hidden = output.get("decoder_hidden_states") or output["hidden_states"]
        return Observed(states.flatten(0, 1)[rows], hidden, attentions)

    def _read(
        self, inputs: Mapping[str, torch.Tensor], with_hidden: bool
    ) -> tuple[Mapping, torch.Tensor]:
        # With a cache, models would ignore where packed documents begin.
        options = {"use_cache": False, "output_hidden_states": with_hidden}
        if not self.fused:
            output = self.engine(**inputs, **options)
            return output, output.logits
        with self.head.doing(lambda hidden, weight, bias: hidden):
            output = self.engine(**inputs, **options)
        return output, output.logits

    def within(
        self, observed: Observed, use: Callable[[Teacher], None], device: torch.device
    ) -> None:
        """Call `use` with a `Teacher` for the observed tokens. The head's weight is gathered during
        the call.

        `use` must store its results itself. It must not return them through the head's module,
        because the teacher's engine would expect a backward from them."""
        if not self.fused:
            use(LogitsTeacher(observed.states.to(device)))
            return
        with self.head.doing(
            lambda hidden, weight, bias: use(HeadTeacher(hidden, weight, bias, device))
        ):
            self.head(observed.states)
