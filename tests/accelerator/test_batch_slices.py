"""What a block's slices cost: its weights move as for one batch, and activations as for a slice."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import nn

import zero
from tests.accelerator import device
from tests.accelerator.test_counts import BLOCKS, WIDTH, Model
from tests.dist.training import ds_config, start, step
from tests.processes import run_on
from zero.comm import traffic
from zero.comm.traffic import IN, NETWORK, OUT, READ, WRITTEN
from zero.offload import tiers
from zero.offload.activations import MIN_BYTES
from zero.slicing import blocks, head

ROWS = 4096
HOST = {"device": "cpu"}
AWAY = {"offload_param": HOST, "offload_optimizer": {**HOST, "overlap_step": False}}
# What one row takes in a block for its backward: the inputs of norm, up and down, a ReLU's result.
OF_ROW = 4 * (WIDTH + WIDTH + 2 * WIDTH)


WORDS, CHUNK = 512, 64


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Model()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.body.blocks:
            x = block(x)
        logits = self.lm_head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, WORDS), labels.flatten())


def third_step(
    rank: int, world_size: int, micro_batches: int, sections: dict[str, Any], chunk: int = 0
) -> tuple[Counter[str], int, int, float]:
    """Bytes moved by link, the most bytes on the device above those before the step, how often the
    host waited, and the loss. `chunk`: tokens of a chunk of logits, which a model with a head has.
    """
    tiers.LEAST_BYTES_IN_A_FILE, head.CHUNK_ELEMENTS_ELSEWHERE = MIN_BYTES, chunk * WORDS
    keys = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = ds_config(accumulation=micro_batches, **keys, **AWAY, **sections)
    torch.manual_seed(0)
    made = (WithHead() if chunk else Model()).to(device.NAME)
    engine: zero.ZeroEngine = start(made, config)[0]
    shape = (ROWS // 64, 64) if chunk else (ROWS,)
    rows = torch.randn(*shape, WIDTH, device=device.NAME).chunk(micro_batches)
    labels = {"labels": torch.randint(WORDS, shape).to(device.NAME)} if chunk else {}
    parts = [{"x": part} | labels for part in rows]
    for _ in range(2):
        step(engine, parts)
    moved, before = Counter(traffic.MOVED), torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    waits = device.waits()
    loss, *_ = step(engine, parts)
    waits = device.waits() - waits
    assert device.mistakes() == []
    peak = torch.accelerator.max_memory_allocated() - before
    return traffic.MOVED - moved, peak, waits, loss


def test_weights_and_gradients_move_once_whatever_the_number_of_slices():
    whole = run_on(2, third_step, 1, {}, simulated=True)
    for slices in (4, 16):
        section = {"activation_checkpointing": {"batch_slices": slices, "trust_slices": True}}
        for (moved, peak, waits, _), (once, most, waits_of_one, _) in zip(
            run_on(2, third_step, 1, section, simulated=True), whole, strict=True
        ):
            assert moved == once
            assert waits == waits_of_one
            # Of the whole batch: the results of all blocks, and in a backward the gradient of one,
            # that of its input in slices and joined, and that of the loss's square. The rest is
            # what the slice that runs has saved, and its gradients.
            whole_batch = (BLOCKS + 4) * ROWS * 4 * WIDTH
            assert peak < whole_batch + 3 * OF_ROW * ROWS // slices
            assert peak < most
    for moved, *_ in run_on(2, third_step, 4, {}, simulated=True):
        assert all(moved[link] > 3 * whole[0][0][link] for link in (IN, OUT, NETWORK))


def test_inputs_of_blocks_wait_in_host_memory_or_in_a_file(tmp_path):
    section = {"batch_slices": 16, "trust_slices": True}
    kept, on_host, in_file = (
        run_on(2, third_step, 1, {"activation_checkpointing": each}, simulated=True)
        for each in (
            section,
            section | {"cpu_checkpointing": True},
            section | {"nvme_path": str(tmp_path)},
        )
    )
    # Each goes out once and comes back once, as does the input of the loss's square.
    results = (BLOCKS + 1) * ROWS * 4 * WIDTH
    # Of those of all blocks, the device has that of the block that runs, and the next one.
    for away, links in ((on_host, (IN, OUT)), (in_file, (READ, WRITTEN))):
        for (moved, peak, waits, _), (without, most, waits_without, _) in zip(
            away, kept, strict=True
        ):
            for link in links:
                assert moved[link] == without[link] + results
            assert peak <= most - (BLOCKS - 2) * ROWS * 4 * WIDTH
            assert away is in_file or waits == waits_without


def test_no_tensor_of_all_tokens_and_words():
    logits = ROWS * WORDS * 4
    section = {"activation_checkpointing": {"batch_slices": 4, "trust_slices": True}}
    whole = run_on(2, third_step, 1, section, ROWS, simulated=True)
    chunks = run_on(2, third_step, 1, section, CHUNK, simulated=True)
    for (moved, peak, _, loss), (once, most, _, expected) in zip(chunks, whole, strict=True):
        assert moved == once  # the head is gathered as often
        assert most > 2 * logits
        # Inputs of all blocks and of the head; gradients of the head, summed and of one chunk; and
        # some tensors of a chunk.
        assert (
            peak
            < (BLOCKS + 4) * ROWS * 4 * WIDTH + 4 * WORDS * 4 * WIDTH + 6 * logits * CHUNK // ROWS
        )
        assert abs(loss - expected) < 1e-6 * expected


def first_step(rank: int, world_size: int) -> list[str]:
    """The warnings of a first step on a device without free memory, without and with host memory
    for the blocks' inputs.
    """
    told = []
    for section in ({}, {"cpu_checkpointing": True}):
        section |= {"batch_slices": 4, "trust_slices": True}
        engine: zero.ZeroEngine = start(
            Model().to(device.NAME), ds_config(activation_checkpointing=section)
        )[0]
        with (
            mock.patch.object(torch.accelerator, "get_memory_info", lambda _: (-(2**40), 2**40)),
            mock.patch.object(blocks.logger, "warning") as warning,
        ):
            step(engine, [{"x": torch.randn(ROWS, WIDTH, device=device.NAME, requires_grad=True)}])
        messages = (call.args[0] % call.args[1:] for call in warning.call_args_list)
        told += [message for message in messages if "batch_slices" in message]
        engine.destroy()
    return told


def test_inputs_that_do_not_fit_are_announced():
    ((told, *others),) = run_on(1, first_step, simulated=True)
    assert others == []
    assert f"the inputs of {BLOCKS} blocks will take 0.0 GB" in told
    assert "set activation_checkpointing.cpu_checkpointing to true" in told
