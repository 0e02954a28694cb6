"""Sends weights and gradients as 8-bit integers (gradients also as 4-bit ones), with a scale for
each block of values.

After ZeRO++ (arXiv 2306.10209): its quantized weight communication (qwZ) and quantized gradient
communication (qgZ).

[Note: codes and scales] A message is the codes of all blocks, then their scales in fp32. A block is
256 consecutive values of one rank's slice. The last one is filled up with zeros.

    scale = largest magnitude in the block / 127 (4 bits: / 7)
    code  = value / scale, rounded to the nearest integer
    value = code * scale, which is off by half a scale at most

So 256 fp32 values take 260 bytes, and 132 with 4 bits. A block with a value that is not finite has
a scale that is not finite. All of it becomes NaN or infinite, so an overflow is still noticed.

[Note: machines] If each rank sent its gradients to every other one, all ranks of a machine would
send everything through the machine's link to the network. So the ranks of a machine sum theirs
first. Each of them sums one part, and sends it to the rank with the same place on each other
machine. This sum is rounded again. A rank sends as many bytes as before, but only 1/p of them leave
a machine of p ranks.

[Note: what is exact] The codes of one weight are the same on all ranks, its owner included: all
compute with the same rounded weights. Masters and shards are never rounded, and what is saved or
changed is gathered from them by the plain communicator. Each rank rounds its gradients once, for
the others, and the sum of its machine once for the other machines. Sums are made in fp32, with its
own gradients as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from zero.comm.communicator import Communicator
from zero.comm.fingerprint import NamedGroup
from zero.comm.traffic import note_copy
from zero.comm.work import Pending
from zero.device import compute_stream, is_accelerator, new_stream

BLOCK = 256
SCALE_BYTES = 4
# Blocks of zeros get a scale above zero.
LEAST_MAGNITUDE = 1e-30
# Values that are coded at a time: on a CPU the steps between stay in the cache, elsewhere they are
# not too large.
AT_A_TIME = {"cpu": 1 << 18}
AT_A_TIME_ELSEWHERE = 1 << 24


def message_bytes(numel: int, bits: int) -> int:
    """Bytes of a message of so many values."""
    return -(-numel // BLOCK) * (BLOCK * bits // 8 + SCALE_BYTES)


def machine_size(machines: Sequence[object]) -> int:
    """How many consecutive ranks share a machine, or 1 if machines differ in that.

    Args:
        machines: the machine of each rank, in order.
    """
    size = machines.count(machines[0])
    same = [
        len(set(machines[start : start + size])) == 1 for start in range(0, len(machines), size)
    ]
    return size if len(machines) % size == 0 and all(same) else 1


def _parts(
    values: torch.Tensor, message: torch.Tensor, bits: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Parts of 1-D `values`, each with its codes (blocks, bytes of a block) and scales (blocks, 1)
    in `message`.
    """
    blocks = -(-values.numel() // BLOCK)
    codes = message[: blocks * BLOCK * bits // 8].view(blocks, -1)
    scales = message[codes.numel() :].view(torch.float32).view(blocks, 1)
    step = AT_A_TIME.get(values.device.type, AT_A_TIME_ELSEWHERE)
    yield from zip(
        values.split(step), codes.split(step // BLOCK), scales.split(step // BLOCK), strict=True
    )


def encode(values: torch.Tensor, message: torch.Tensor, bits: int) -> None:
    """Write the codes and scales of `values` (1-D, floating-point) to `message` (uint8,
    `message_bytes` long).
    """
    largest_code = 2 ** (bits - 1) - 1
    for part, codes, scales in _parts(values, message, bits):
        if part.numel() % BLOCK:
            part = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK))
        rows = part.view(-1, BLOCK).float()
        torch.amax(rows.abs(), 1, keepdim=True, out=scales)
        scales.clamp_(min=LEAST_MAGNITUDE).div_(largest_code)
        rounded = (rows * scales.reciprocal()).round_()
        if bits == 8:
            codes.view(torch.int8).copy_(rounded)
        else:  # the first half of the block in the low bits, the second half in the high bits
            low, high = rounded.to(torch.int8).view(torch.uint8).chunk(2, dim=1)
            codes.copy_((low & 15) | (high << 4))


def decode(
    message: torch.Tensor, into: torch.Tensor, bits: int, add: bool = False, factor: float = 1.0
) -> None:
    """Write the values of `message`, times `factor`, to `into` (1-D, floating-point), or add them
    to it.
    """
    for part, codes, scales in _parts(into, message, bits):
        if bits == 8:
            integers = codes.view(torch.int8)
        else:  # shifts of signed integers keep the sign
            signed = codes.view(torch.int8)
            integers = torch.cat([(signed << 4) >> 4, signed >> 4], dim=1)
        scales = scales if factor == 1.0 else scales * factor
        if not add and part.numel() % BLOCK == 0:
            torch.mul(
                integers, scales, out=part.view(-1, BLOCK)
            )  # without a pass over memory between
        else:
            values = (integers * scales).view(-1)[: part.numel()]
            part.add_(values) if add else part.copy_(values)


class _CodedSum:
    """A sum over a group, to which ranks send each other codes.

    Args:
        slices: (places, m, n), `slices[i]` is this rank's part of what place i gets.
        place: this rank's own.

    Attributes:
        sent, received: the messages to and from each place.
        own: this rank's part of what it gets, (m, n).
    """

    def __init__(self, slices: torch.Tensor, place: int, bits: int):
        self._slices = slices
        self._bits = bits
        self.own = slices[place]
        places, m, n = slices.shape
        self._others = [each for each in range(places) if each != place]
        self.sent = torch.empty(
            places, m * message_bytes(n, bits), dtype=torch.uint8, device=slices.device
        )
        self.received = torch.empty_like(self.sent)

    def encode(self) -> None:
        for place in self._others:
            for values, message in zip(
                self._slices[place], self.sent[place].chunk(len(self.own)), strict=True
            ):
                encode(values, message, self._bits)

    def add_to(self, total: torch.Tensor, factor: float = 1.0) -> None:
        """Add what came from the others, times `factor`, to `total` (m, n)."""
        for place in self._others:
            for part, message in zip(total, self.received[place].chunk(len(total)), strict=True):
                decode(message, part, self._bits, add=True, factor=factor)


@dataclass(eq=False, repr=False)
class CompressedCommunicator:
    """A communicator whose `all_gather` of weights, and whose sums of gradients, send codes and
    scales.

    Everything else is the given communicator's.

    Args:
        weights, frozen_weights: whether gathers of all groups, or of those without trainable
            parameters, are compressed.
        gradient_bits: 8, 4, or None for gradients as they are.
        machine: the same ranks with shard groups that are the ranks of a machine, or None if each
            rank sends to each other one.
    """

    comm: Communicator
    _: KW_ONLY
    weights: bool
    frozen_weights: bool
    gradient_bits: int | None
    machine: Communicator | None = None
    _sums: torch.Stream | None = field(default=None, init=False)  # made when it is needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: NamedGroup | None = None
    ) -> Pending:
        """As `Communicator.all_gather`, but `full` gets rounded values, also this rank's own. Bytes
        of weights that are codes already are gathered as they are.
        """
        is_frozen = group is not None and not group.trainable
        if not full.is_floating_point() or not (
            self.weights or (self.frozen_weights and is_frozen)
        ):
            return self.comm.all_gather(full, shard, group)
        ranks, n = self.shard_group, shard.numel()
        if shard.device != full.device:
            own = full.narrow(0, ranks.rank * n, n)
            note_copy(own, shard)
            shard = own.copy_(shard, non_blocking=True)
        messages = torch.empty(
            ranks.size, message_bytes(n, 8), dtype=torch.uint8, device=full.device
        )
        encode(shard, messages[ranks.rank], 8)
        gathered = self.comm.all_gather(messages.view(-1), messages[ranks.rank], group)

        def finish() -> None:
            for message, part in zip(messages, full.split(n), strict=True):
                decode(message, part, 8)

        return Pending([gathered], finish)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        accumulate: bool,
        group: NamedGroup | None = None,
    ) -> Pending:
        """As `Communicator.reduce_scatter`, with sums in fp32 on every backend. See the note on
        machines.
        """
        bits = self.gradient_bits
        if bits is None:
            return self.comm.reduce_scatter(out, full, accumulate, group)
        near, rows = self.machine or self.comm, full.view(self.shard_group.size, -1)
        ranks, machines = near.shard_group, near.replicate_group
        coded = _CodedSum(rows.unflatten(0, (-1, ranks.size)).transpose(0, 1), ranks.rank, bits)
        coded.encode()
        arrived = near.start_all_to_all(coded.received, coded.sent, group)
        if self.machine is None:
            return Pending([arrived], lambda: self._finish(out, coded, accumulate))
        sums = torch.empty(machines.size, out.numel(), dtype=torch.float32, device=out.device)
        of_machines = _CodedSum(sums.unsqueeze(1), machines.rank, bits)

        def send_sums() -> Pending:
            arrived.wait()
            sums.copy_(coded.own)
            coded.add_to(sums)
            of_machines.encode()
            return near.start_all_to_all(of_machines.received, of_machines.sent, group, across=True)

        def finish() -> None:
            if not works:
                send_sums().wait()
            self._finish(out, of_machines, accumulate)

        works = [self._beside_compute(send_sums)] if is_accelerator(out.device) else []
        return Pending(works, finish)

    # Where every rank needs all of the sum (stage 0), it is gathered as it is.
    reduce = Communicator.reduce

    def _beside_compute(self, start: Callable[[], Pending]) -> Pending:
        """Have a stream of its own wait, sum and send, so that the compute stream does not wait in
        between.
        """
        self._sums = self._sums or new_stream(self.device)
        self._sums.wait_stream(compute_stream(self.device))
        with self._sums:
            return start()

    def _finish(self, out: torch.Tensor, coded: _CodedSum, accumulate: bool) -> None:
        """Write the sum to `out`, or add it: a sum or a mean, as a reduce-scatter of this backend
        gives.
        """
        factor = 1.0 / (self.shard_group.size * self.mean_factor)
        total, own = out.float(), coded.own[0]  # `out` itself if that is fp32
        total = total.add_(own, alpha=factor) if accumulate else total.copy_(own).mul_(factor)
        coded.add_to(total.unsqueeze(0), factor)
        if total is not out:
            out.copy_(total)
