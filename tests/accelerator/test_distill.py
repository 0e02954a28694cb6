"""The loss of a distillation does not make the host wait for the device.

Counted on the simulated accelerator. transformers' models read from an attention mask whether
anything is masked. Here are no masks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from distill.batch import Batch
from distill.config import DistillationConfig
from distill.fused import Recipe
from distill.heads import install_task_head
from distill.objective import HeadLoss
from distill.teacher import LiveTeacher
from distill.trainer import DistillationTrainer
from tests.accelerator import device
from tests.dist.training import ds_config, start
from tests.distill import models
from tests.parity.test_offload import NVME
from tests.processes import run_on
from zero.offload import tiers

STEPS = 3


def waits_of_losses(
    rank: int, world_size: int, kind: str, options: dict[str, Any], folder: str
) -> list[int]:
    """Train without masks. Return for each `compute_loss` how often the host has waited."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:{rank}"
    make, waits = getattr(models, kind), []

    class Counting(DistillationTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            before = device.waits()
            loss = super().compute_loss(*args, **kwargs)
            waits.append(device.waits() - before)
            return loss

    args = DistillationConfig(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, optim="sgd", **options,
    )  # fmt: skip
    both = make(16, 2, seed=1), make(32, 3, seed=2)
    data = models.sequences(12, 8, 8)
    trainer = Counting(*both, args, train_dataset=data, data_collator=whole_rows)
    trainer.train()
    history = trainer.state.log_history
    assert all(entry["kd_loss"] > 0 for entry in history if "loss" in entry)
    return waits


def whole_rows(examples: list[dict]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([each[key] for each in examples]) for key in ("input_ids", "labels")}


LAYERS = {"hidden_loss_weight": 0.1, "attn_relation_weight": 0.1}


@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        ("llama", LAYERS | {"overlap_teacher": True}, 2),
        ("t5", {"top_k": 4, "temperature": 2.0}, 0),
    ],
    ids=["llama, layers, overlapping", "t5, top k"],
)
def test_a_loss_is_computed_without_a_wait(kind, options, own, tmp_path):
    """Only in the first batch: there it is tested whether anything comes after the heads, and
    whether the teacher predicts NaN. Each Llama itself asks whether its sequences are packed.
    """
    (waits,) = run_on(1, waits_of_losses, kind, options, str(tmp_path), simulated=True)
    assert len(waits) == 2 * STEPS and waits[0] > own >= max(waits[1:])


# -- the teacher beside the student

# Without a room for reuse: each block is gathered for each use.
FEW = {
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 1,
    "stage3_max_reuse_distance": 0,
}
TEACHER_BLOCKS = 4


def distilled(
    rank: int, world_size: int, folder: str, sections: dict[str, Any] | None, overlaps: bool
) -> tuple[list[float], list[int]]:
    """Train a student at stage 3. Return the losses, and how many of the teacher's blocks may still
    be running when the student's first block begins.

    `sections`: of the teacher's engine; None: it is whole on the device.
    """
    tiers.LEAST_BYTES_IN_A_FILE = 1
    here = torch.device(device.NAME, rank)
    student = models.llama(16, 2, seed=1).to(here)
    teacher = models.llama(32, TEACHER_BLOCKS, seed=2).to(here)
    head = install_task_head(student, "student")
    engine, _ = start(student, ds_config(**FEW))
    config = None
    if sections is not None:
        sections = {name: each | {"nvme_path": folder} for name, each in sections.items()}
        config = ds_config(**FEW, **sections)
    live = LiveTeacher(teacher, here, config, overlaps)

    results: list[torch.Tensor] = []
    for block in teacher.model.layers:
        block.register_forward_hook(lambda _module, _args, output: results.append(output))
    beside: list[int] = []

    def read_too_early(*_: object) -> None:
        """Nothing orders what this reads with the teacher, if the two run at the same time."""
        assert (found := device.mistakes()) == [], found
        for result in results:
            result.record_stream(torch.accelerator.current_stream())
            result.sum()
        beside.append(sum("aten::sum" in mistake for mistake in device.mistakes()))

    student.model.layers[0].register_forward_pre_hook(read_too_early)
    losses = []
    for number in range(STEPS):
        examples = models.sequences(STEPS * 4)[number * 4 + rank * 2 :][:2]
        inputs = {name: value.to(here) for name, value in models.Pad()(examples).items()}
        batch = Batch.of(inputs, shifted=True)
        observed = live.observe(batch.teacher, batch.rows)
        compared = HeadLoss(batch, Recipe(), observed)
        with head.doing(compared.of_hidden_states):
            loss = engine(**batch.student, use_cache=False).logits.sum()
        results.clear()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, beside


HOST = {"offload_param": {"device": "cpu"}}
# With files, the host waits for each read, so that only the last blocks may still be running.
PLACES = {
    "whole": (1, None, TEACHER_BLOCKS),
    "files": (1, {"offload_param": NVME}, 1),
    "2 ranks": (2, {}, TEACHER_BLOCKS),
    "2 ranks, host": (2, HOST, TEACHER_BLOCKS),
}


@pytest.mark.parametrize(("world_size", "sections", "least"), PLACES.values(), ids=PLACES)
def test_a_teacher_beside_the_student_changes_nothing(tmp_path, world_size, sections, least):
    given = world_size, distilled, str(tmp_path), sections
    for alone, beside in zip(
        run_on(*given, False, simulated=True), run_on(*given, True, simulated=True), strict=True
    ):
        assert beside[0] == alone[0]
        # In the first batches the host waits: it tests the teacher's predictions and weights.
        assert alone[1] == [0] * STEPS and beside[1][-1] >= least
