"""A student and its teacher on the simulated accelerator, as in run_distill.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers

import zero
from benchmarks.estimate.worker import measure_steps, shape_of
from distill.batch import Batch, with_decoder_inputs
from distill.fused import Recipe
from distill.heads import install_task_head
from distill.objective import HeadLoss
from distill.teacher import LiveTeacher, teacher_ds_config
from tests.accelerator import device
from zero.tools.estimate.model import class_of


def shapes_of(
    name: str, sizes: tuple[dict[str, int], dict[str, int]]
) -> list[transformers.PretrainedConfig]:
    """The configurations of student and teacher."""
    shapes = [shape_of(name), shape_of(name)]
    for shape, changed in zip(shapes, sizes, strict=True):
        shape.update(changed)
    return shapes


def measure_distillation(
    rank: int,
    world_size: int,
    name: str,
    sizes: tuple[dict[str, int], dict[str, int]],
    settings: dict[str, Any],
    batch: int,
    length: int,
) -> dict[str, int]:
    """Train a model with a teacher. Both are of this kind, with these sizes. Return what `measure`
    does.
    """
    shape, their_shape = shapes_of(name, sizes)
    student, teacher = (class_of(each)(each) for each in (shape, their_shape))
    head = install_task_head(student, "student")
    engine = zero.initialize(model=student, config=settings)[0]
    args: Any = SimpleNamespace(teacher_deepspeed=None, deepspeed=settings, fp16=False, bf16=False)
    live = LiveTeacher(teacher, engine.device, teacher_ds_config(args, teacher))
    ids = torch.randint(3, shape.vocab_size, (batch, length)).to(device.NAME)
    shifted = not shape.is_encoder_decoder
    counts = [length - shifted] * batch
    given = {"input_ids": ids, "labels": ids, "target_counts": counts}
    inputs = with_decoder_inputs(given, student)

    def loss() -> torch.Tensor:
        examples = Batch.of(inputs, shifted)
        compared = HeadLoss(examples, Recipe(), live.observe(examples.teacher, examples.rows))
        with head.doing(compared.of_hidden_states):
            return engine(**examples.student, use_cache=False).logits.sum()

    return measure_steps(loss, settings, engine, live.engine)
