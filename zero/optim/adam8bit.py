"""Adam's moments as 8-bit codes, with an fp32 scale for each block of 256 elements of a sub-group.

    exp_avg      int8, from -127 to 127    scale * sign(code) * (code / 127) ** 4
    exp_avg_sq   uint8                     scale * (code / 255) ** 8

The scale is the largest absolute value of the block, which is thus exact; at least 1.2e-38. Roots
give small values many codes, and need no tables. A second moment above 0 never becomes 0, because a
step divides by its square root. If one of an element's moments is infinite or NaN, both are stored
as 0: so no other element of the block suffers.

[Note: thresholds] A step changes a second moment by a thousandth or so, and codes are 3% apart:
rounded to the nearest one, it would stay where it is, or follow the scale. A small first moment
without gradients would never become 0. So in a step the threshold from which a moment is rounded up
changes with the step and the element's place in the block. It runs through a golden-ratio sequence,
which meets each interval as often as its length says. (Random numbers do so too, but only on the
average of many more steps; figures in benchmarks/LOG.md.) Outside of steps the nearest code is
taken. Thresholds keep a distance from both ends: so a value that is exactly a code stays one in
spite of the roots' last bits.

A coded tensor is uint8 and 1-D: the codes, up to 3 bytes of padding, the scales. 0 bytes mean 0.
`adam_cpu` reads and writes codes in its one pass. All others use the functions here, which compute
the same."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
# The number of a step, from 1 on; None outside of steps.
Step = int | torch.Tensor | None

BLOCK = 256
KEYS = ("exp_avg", "exp_avg_sq")
# Smaller scales are not used: their inverse is not finite.
_LEAST = torch.finfo(torch.float32).tiny
# 2 ** 32 divided by the golden ratio, and numbers without a pattern; the last one is for first
# moments. See the note.
_OF_STEP, _OF_PLACE, _OF_FIRST = 0x9E3779B9, 0x85EBCA6B, 0x5BD1E995
_EDGE = 1 / 4096
# Elements that are encoded together, which bounds temporary memory. On a CPU it stays in the cache:
# 15 ns an element, not 40. Other devices launch fewer kernels.
_PIECE_ON_CPU, PIECE = 1 << 18, 1 << 22


def nbytes(numel: int) -> int:
    """Bytes of a coded tensor of `numel` elements."""
    return _start_of_scales(numel) + 4 * -(-numel // BLOCK)


def _start_of_scales(numel: int) -> int:
    return -(-numel // 4) * 4


def new(master: torch.Tensor) -> torch.Tensor:
    """A coded tensor of zeros for the elements of `master`, on its device."""
    return torch.zeros(nbytes(master.numel()), dtype=torch.uint8, device=master.device)


def is_coded(value: object, numel: int) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a coded tensor of `numel` elements."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.uint8
        and value.shape == (nbytes(numel),)
    )


def parts(coded: torch.Tensor, numel: int) -> Pair:
    """(codes, uint8; scales, fp32), both 1-D, as views."""
    return coded[:numel], coded[_start_of_scales(numel) :].view(torch.float32)


def cut(coded: torch.Tensor, numel: int, first: int, end: int) -> torch.Tensor:
    """The elements from `first` to `end` of a coded tensor of `numel` elements, coded as they are.

    `first` is the begin of a block, or `end` is in its block.
    """
    made = torch.empty(nbytes(end - first), dtype=torch.uint8, device=coded.device)
    (codes, scales), (of_all, all_scales) = parts(made.zero_(), end - first), parts(coded, numel)
    codes.copy_(of_all[first:end])
    scales.copy_(all_scales[first // BLOCK : -(-end // BLOCK)])
    return made


@torch.no_grad()
def encode(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: Step = None) -> Pair:
    """Coded tensors of both moments (fp32, 1-D) of a sub-group, after the step of this number, or
    outside of steps.
    """
    made = new(exp_avg), new(exp_avg_sq)
    codes, scales = zip(*(parts(each, exp_avg.numel()) for each in made), strict=True)
    most = _PIECE_ON_CPU if exp_avg.device.type == "cpu" else PIECE
    pieces = [each.split(most) for each in (*codes, exp_avg, exp_avg_sq)]
    pieces += [each.split(most // BLOCK) for each in scales]
    for code, code_sq, m, v, scale, scale_sq in zip(*pieces, strict=True):
        _encode_into((code, code_sq), (scale, scale_sq), m, v, step)
    return made


def turn(step: int) -> int:
    """The step's part of the thresholds, 32 bits."""
    return step * _OF_STEP & 0xFFFFFFFF


def _thresholds(step: Step, shift: int, device: torch.device) -> torch.Tensor | float:
    """The fp32 numbers that are added to the codes of a block before they are truncated."""
    if step is None:
        return 0.5
    # The host does not wait for the copy.
    step = torch.as_tensor(step).to(device, torch.int64, non_blocking=True)
    places = torch.arange(BLOCK, device=device, dtype=torch.int64)
    turns = (step * _OF_STEP + places * _OF_PLACE + shift) & 0xFFFFFFFF
    return (turns >> 16).float().div_(65536).clamp_(_EDGE, 1 - _EDGE)


def _encode_into(
    codes: Pair, scales: Pair, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: Step
) -> None:
    finite = exp_avg.isfinite() & exp_avg_sq.isfinite()
    for code, scale, values, levels in zip(
        codes, scales, (exp_avg, exp_avg_sq), (127, 255), strict=True
    ):
        blocks = values.new_zeros(scale.numel() * BLOCK)
        blocks[: values.numel()] = values.where(finite, 0.0)
        blocks = blocks.view(-1, BLOCK)
        torch.amax(blocks.abs(), 1, out=scale).clamp_(min=_LEAST)
        halvings = 2 if levels == 127 else 3
        size = _root(blocks.abs(), halvings) * _root(scale, halvings).reciprocal()[:, None]
        threshold = _thresholds(step, _OF_FIRST if levels == 127 else 0, values.device)
        size = size.mul_(levels).add_(threshold).floor_().clamp_(max=levels)
        if levels == 127:
            size.copysign_(blocks)
        else:
            size.clamp_(min=1).masked_fill_(blocks == 0, 0)
        code.copy_(size.view(-1)[: values.numel()].to(torch.int16).bitwise_and_(255))


def _root(values: torch.Tensor, halvings: int) -> torch.Tensor:
    for _ in range(halvings):
        values = values.sqrt()
    return values


@torch.no_grad()
def decode(key: str, codes: torch.Tensor, scales: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """The fp32 values of some codes of the state `key`, of which the first is element `begin` of
    its block.
    """
    # Products, as in the kernel. 127 * (1 / 127) is exactly 1 in fp32, and so is 255 * (1 / 255).
    ratio = (
        codes.view(torch.int8).float() * (1 / 127) if key == KEYS[0] else codes.float() * (1 / 255)
    )
    power = ratio.square().square_()
    power = power.copysign_(ratio) if key == KEYS[0] else power.square_()
    return power.mul_(scales.repeat_interleave(BLOCK)[begin : begin + codes.numel()])


def decode_range(key: str, coded: torch.Tensor, numel: int, first: int, end: int) -> torch.Tensor:
    """The fp32 values of the elements from `first` to `end` of a coded tensor of `numel` elements,
    the state `key`.
    """
    codes, scales = parts(coded, numel)
    blocks = slice(first // BLOCK, -(-end // BLOCK))
    return decode(key, codes[first:end], scales[blocks], first % BLOCK)


def decoded(state: dict[str, Any], numel: int) -> dict[str, Any]:
    """A sub-group's state with fp32 moments in the place of coded ones."""
    return {
        key: decode(key, *parts(v, numel)) if is_coded(v, numel) else v for key, v in state.items()
    }


def encoded(
    state: dict[str, Any], into: dict[str, Any], step: Step = None
) -> dict[str, torch.Tensor]:
    """The coded moments of a sub-group's state, which has fp32 ones: in the tensors of `into` if
    it has coded ones.

    `step`: as for `encode`. On an accelerator each step may have a stream of its own. A tensor that
    is kept need not wait for all of them."""
    found = {}
    made_of_both = encode(state[KEYS[0]], state[KEYS[1]], step)
    for key, made in zip(KEYS, made_of_both, strict=True):
        found[key] = into[key].copy_(made) if key in into else made
    return found
