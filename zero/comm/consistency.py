"""Compares values that must be equal on all ranks, so that a difference is an error before the
ranks train different weights.

The input is a dict of facts, {key: text}. One small reduction compares a digest of them. Only if it
differs, the ranks exchange the facts themselves, to name the rank, the key and the values. This
file does not know what the facts are about."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from zero.comm.communicator import Communicator
from zero.errors import UsageError
from zero.releases import installed

# Differences that an error names.
SHOWN = 5


def require_same(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Raise UsageError, on every rank, unless the facts are equal on all ranks of `comm`.

    All ranks must call it.
    """
    found = differences(comm, facts)
    if not found:
        return
    if len(found) > SHOWN:
        found = [*found[:SHOWN], f"and {len(found) - SHOWN} more"]
    raise UsageError(
        "the ranks disagree:\n  " + "\n  ".join(found) + "\nEvery rank must be started with the "
        "same script, arguments and files, and build the same model and optimizer"
    )


def differences(comm: Communicator, facts: Mapping[str, object]) -> list[str]:
    """Where the facts differ between ranks: key, values and ranks.

    The same on all ranks, which must all call it.
    """
    if comm.world_size == 1:
        return []
    text = json.dumps({key: str(value) for key, value in facts.items()})
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=comm.device)
    least, most = comm.all_reduce(bounds, "min").tolist()
    if least == -most:
        return []
    on_rank = [json.loads(each) for each in comm.exchange(text)]
    found = []
    for key in dict.fromkeys(key for facts in on_rank for key in facts):
        first, *others = (facts.get(key, "missing") for facts in on_rank)
        for rank, other in enumerate(others, 1):
            if other != first:
                found.append(f"{key}: {first} on rank 0, {other} on rank {rank}")
                break
    return found or ["parameters are in another order"]


def hyper_parameters(param_groups: Sequence[Mapping]) -> dict[str, float]:
    """The numbers in an optimizer's param groups, by name; parameters by their count, flags as 0
    and 1.
    """
    numbers: dict[str, float] = {}
    for index, group in enumerate(param_groups):
        for key, value in group.items():
            name = f"param group {index}, {key}"
            if key == "params":
                value = len(value)
            values = value if isinstance(value, (tuple, list)) else [value]
            for place, number in enumerate(values):
                is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1
                if is_scalar or isinstance(number, (int, float)):
                    numbers[f"{name}[{place}]" if len(values) > 1 else name] = float(number)
    return numbers


def flat(nested: Mapping, prefix: str = "") -> dict[str, object]:
    """A nest of dicts as one dict with dotted keys."""
    result: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the installed libraries that affect results.

    Which of them are imported may differ by rank.
    """
    packages = ("zero-engine", "transformers", "accelerate", "peft")
    found = {f"version of {name}": installed(name) or "not installed" for name in packages}
    return {"version of torch": str(torch.__version__)} | found


def spread(numbers: Sequence[float]) -> list[float]:
    """The values to sum over ranks: from the sums, `disagree` tells whether each number is equal on
    all ranks.
    """
    return [*numbers, *(number * number for number in numbers)]


def disagree(sums: Sequence[float], world_size: int) -> bool:
    """Whether some number has a variance over ranks beyond fp64 rounding.

    `sums` are those of `spread`'s result.
    """
    half = len(sums) // 2
    tolerance = 4 * world_size * torch.finfo(torch.float64).eps
    pairs = zip(sums[:half], sums[half:], strict=True)
    return any(
        world_size * squares - total * total > tolerance * world_size * squares
        for total, squares in pairs
    )
