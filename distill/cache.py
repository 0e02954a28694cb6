"""The teacher's probabilities in files, so that students can learn from a teacher that is not
loaded.

[Note: what is in a cache] `cache.json` has the teacher and its revision, tokenizer, temperature, k
and how the k tokens are chosen. Each `part-*.safetensors` holds E examples with T targets in total:
`keys` (E, 32) uint8, `starts` (E + 1), `checksums` (E,), `indices` (T, k) int32, `log_p` fp32 and
`cross_entropy` (T,) fp32. For the most probable tokens, `log_p` is (T, k + 1), with the mass of all
others in the last column. Sampled tokens have no such column, so they take 8 k + 4 bytes a target.
The key of an example is a hash of its token ids, labels and positions, so order and padding do not
matter, and a different text or tokenizer gives different keys. A missing example is an error. Each
part appears by a single rename, and an interrupted run continues with the missing examples."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from distill.batch import IGNORED, TARGET_COUNTS, Batch
from distill.fused import StoredTeacher
from distill.losses import log_probabilities, sampled_bins, top_k_with_tail
from distill.options import SAMPLINGS

PART_EXAMPLES = 256
# Key of a batch, written by `distill.data.CountingCollator`: the keys of its examples.
EXAMPLE_KEYS = "example_keys"
_BLOCK = 2**20


class CacheError(ValueError):
    """A teacher cache cannot give the right targets.

    The message names the file or setting, and the remedy.
    """


@dataclass(frozen=True)
class Description:
    """The contents of `cache.json`.

    The probabilities at `temperature` are over the first `tokens` ids. `sampling` says which
    `top_k` of them are stored: the most probable ones, or a sample.
    """

    teacher: str
    revision: str
    tokenizer: str
    temperature: float
    top_k: int
    tokens: int
    sampling: str = "top_k"

    def __post_init__(self) -> None:
        texts = self.teacher, self.revision, self.tokenizer
        numbers = self.top_k, self.tokens, self.temperature
        if not all(isinstance(each, str) for each in texts):
            raise ValueError("teacher, revision and tokenizer are texts")
        if not all(type(each) in (int, float) and 0 < each < math.inf for each in numbers):
            raise ValueError("temperature, top_k and tokens are numbers above 0")
        if not isinstance(self.top_k, int) or not isinstance(self.tokens, int):
            raise ValueError("top_k and tokens are whole numbers")
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling is {self.sampling!r}")


def teacher_revision(name: str, commit: str | None) -> str:
    """Return the hub's commit.

    For a folder: a hash of its configuration and of its weights, which are read as a whole.
    """
    folder = Path(name)
    if not folder.is_dir():
        return commit or "unknown"
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted({*folder.glob("*.safetensors"), *folder.glob("*model*.bin")}):
        digest.update(f" {path.name} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def example_keys(inputs: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Return the key of each example of a batch: a hash of its ids, labels and positions without
    padding.
    """
    batch = {name: inputs[name].cpu() for name in ("input_ids", "labels") if name in inputs}
    mask = inputs.get("attention_mask")
    lengths = (
        [batch["input_ids"].shape[1]] * len(batch["input_ids"])
        if mask is None
        else mask.sum(1).tolist()
    )
    keys = []
    for row, length in enumerate(lengths):
        labels = batch["labels"][row]
        learnt = (labels != IGNORED).nonzero()
        labels = labels[: int(learnt[-1]) + 1] if len(learnt) else labels[:0]
        parts = [batch["input_ids"][row, :length], labels]
        if "position_ids" in inputs:
            parts.append(inputs["position_ids"][row].cpu())
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{len(part)}:".encode() + part.to(torch.int64).numpy().tobytes())
        keys.append(digest.digest())
    return keys


class TeacherCache:
    """Reads a cache. The trainer uses it in place of a teacher.

    Raises:
        CacheError: there is no cache, or a part of it is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.description = _read_description(self.folder)
        self._files = []
        self._where = {}
        for path in sorted(self.folder.glob("part-*.safetensors")):
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            if not path.is_file():  # opening a named pipe would wait for its writer
                raise OSError("no ordinary file")
            file = safe_open(path, "pt")
            keys, starts, checksums = (
                file.get_tensor(name) for name in ("keys", "starts", "checksums")
            )
        except (SafetensorError, OSError) as error:
            raise CacheError(
                f"{path}: damaged ({error}); delete this file and run cache_teacher again, which "
                "adds what is missing"
            ) from error
        places = zip(starts[:-1].tolist(), starts[1:].tolist(), checksums.tolist(), strict=True)
        for key, place in zip(keys, places, strict=True):
            self._where[key.numpy().tobytes()] = _Place(path, len(self._files), *place)
        self._files.append(file)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def check(self, **expected: object) -> None:
        """Raise CacheError if the description differs from the `expected` values.

        None matches any value.
        """
        for name, value in expected.items():
            found = getattr(self.description, name)
            if value is not None and value != found:
                raise CacheError(
                    f"teacher_cache {self.folder} was created with a different {name}: {found!r}, "
                    f"not {value!r};"
                    f" run cache_teacher again into another folder, or use the same {name}"
                )

    def require(self, keys: Iterable[list[bytes]]) -> None:
        """Raise CacheError if an example is missing. Each item has the keys of some examples."""
        missing = sum(key not in self for some in keys for key in some)
        if missing:
            raise self._lacks(f"{missing} of the examples")

    def _lacks(self, what: str) -> CacheError:
        return CacheError(
            f"teacher_cache {self.folder} does not hold {what} in this data (it holds {len(self)} "
            "others): run cache_teacher with the same data, tokenizer, max_length, packing and "
            "source_prefix"
        )

    def targets(self, inputs: Mapping[str, Any], batch: Batch) -> StoredTeacher:
        """Return what is stored for a batch's targets, in their order.

        If `inputs` has no `example_keys` and `target_counts`, both are computed from its tensors,
        and the host waits for the device.

        Raises:
            CacheError: an example is not in the cache, or has a different number of targets there.
        """
        counts = inputs.get(TARGET_COUNTS)
        if counts is None:
            counts = torch.bincount(batch.examples, minlength=batch.size).tolist()
        keys = inputs.get(EXAMPLE_KEYS) or example_keys(inputs)
        rows: list[tuple[torch.Tensor, ...]] = []
        for key, count in zip(keys, counts, strict=True):
            if not count:
                continue
            if key not in self._where:
                raise self._lacks("an example")
            place = self._where[key]
            if place.end - place.start != count:
                raise CacheError(
                    f"teacher_cache {self.folder}: {place.end - place.start} targets are stored, "
                    f"{count} are needed"
                )
            rows.append(self._read(place))
        device, k = batch.labels.device, self.description.top_k
        none = torch.zeros(0, k, dtype=torch.int32), torch.zeros(0, k + 1), torch.zeros(0)
        indices, log_p, cross_entropy = (
            _to_device(torch.cat(parts), device) for parts in zip(*rows or [none], strict=True)
        )
        return StoredTeacher(indices, log_p, cross_entropy)

    def _read(self, place: _Place) -> tuple[torch.Tensor, ...]:
        file = self._files[place.part]
        names = ("indices", "log_p", "cross_entropy")
        rows = tuple(file.get_slice(name)[place.start : place.end] for name in names)
        if _checksum(rows) != place.checksum:
            raise CacheError(
                f"{place.path}: damaged (a checksum differs); delete this file and run "
                "cache_teacher again, which adds what is missing"
            )
        k, tokens = self.description.top_k, self.description.tokens
        if rows[0].shape[1] != k or not 0 <= int(rows[0].max()) < tokens:
            raise CacheError(
                f"{place.path}: it does not have {k} of {tokens} tokens for each target, as "
                f"{self.folder / 'cache.json'} says, so one of them is from another cache: delete "
                f"{self.folder} and run cache_teacher again"
            )
        return rows


class _Place(NamedTuple):
    """Where the targets of an example are stored: rows start to end of a part, with a checksum."""

    path: Path
    part: int
    start: int
    end: int
    checksum: int


def _checksum(rows: tuple[torch.Tensor, ...]) -> int:
    """Return the CRC-32 of all bytes of an example's rows."""
    checksum = 0
    for part in rows:
        checksum = zlib.crc32(part.contiguous().numpy().tobytes(), checksum)
    return checksum


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` to `device`. The host does not wait, because pinned memory is copied in the
    background.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _read_description(folder: Path) -> Description:
    path = folder / "cache.json"
    if not path.is_file():
        raise CacheError(
            f"teacher_cache {folder}: there is no cache.json in it; run cache_teacher first"
        )
    try:
        return Description(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CacheError(
            f"{path}: damaged ({error}); delete {folder} and run cache_teacher again"
        ) from error


class CacheWriter:
    """Writes the examples of one rank, in parts of `PART_EXAMPLES`."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.rank = rank
        self.number = 0
        self._clear()

    def _clear(self) -> None:
        self.keys: list[bytes] = []
        self.rows: list[tuple[torch.Tensor, ...]] = []

    def add(self, key: bytes, rows: tuple[torch.Tensor, ...]) -> None:
        """Add one example: its key, and (indices, log_p, cross_entropy) of its targets."""
        self.keys.append(key)
        self.rows.append(rows)
        if len(self.keys) == PART_EXAMPLES:
            self.flush()

    def flush(self) -> None:
        """Write the examples that were added since the last call."""
        if not self.keys:
            return
        counts = torch.tensor([0, *(len(rows[2]) for rows in self.rows)])
        indices, log_p, cross_entropy = (
            torch.cat(parts).contiguous() for parts in zip(*self.rows, strict=True)
        )
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(self.keys)), dtype=torch.uint8).view(
                -1, 32
            ),
            "starts": counts.cumsum(0),
            "checksums": torch.tensor([_checksum(rows) for rows in self.rows]),
            "indices": indices,
            "log_p": log_p,
            "cross_entropy": cross_entropy,
        }
        while (
            path := self.folder / f"part-{self.rank:03d}-{self.number:05d}.safetensors"
        ).exists():
            self.number += 1
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        self._clear()


@torch.no_grad()
def write_cache(
    folder: str | Path,
    description: Description,
    examples: Sequence[Mapping[str, list[int]]],
    collate: Callable[[Sequence[Mapping[str, list[int]]]], dict[str, torch.Tensor]],
    ask: Callable[[dict[str, torch.Tensor]], tuple[Batch, Callable]],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    show_progress: bool = True,
) -> int:
    """Store the teacher's probabilities for the `examples` that the cache does not hold yet.
    Returns their number.

    `ask(batch)` runs the teacher on a collated batch. It returns the `Batch`, and a function that
    gives the logits (n, V) of a slice of its targets. All ranks call it equally often, because the
    teacher may be sharded.

    Raises:
        CacheError: the folder holds a different or a damaged cache.
    """
    folder = Path(folder)
    if rank == 0:
        _describe(folder, description)
    if world_size > 1:
        PartialState().wait_for_everyone()
    held = TeacherCache(folder)
    held.check(**asdict(description))
    missing = [
        number
        for number, example in enumerate(examples)
        if example_keys(collate([example]))[0] not in held
    ]
    if world_size > 1:
        # All ranks must find the same examples missing, so none may write before all have read.
        PartialState().wait_for_everyone()
    writer = CacheWriter(folder, rank)
    stride = batch_size * world_size
    steps = range(0, len(missing), stride)
    for start in tqdm(steps, desc="caching the teacher", disable=not show_progress, unit="batch"):
        own = missing[start + rank * batch_size : start + (rank + 1) * batch_size]
        # A rank without examples takes part in the all-gathers.
        inputs = collate([examples[number] for number in own or missing[:1]])
        batch, logits_of = ask(inputs)
        stored = _store(batch, logits_of, description)
        for index, key in enumerate(example_keys(inputs) if own else ()):
            writer.add(key, tuple(part[batch.examples == index].cpu() for part in stored))
    writer.flush()
    return len(missing)


def _describe(folder: Path, description: Description) -> None:
    """Write `cache.json`, unless the folder holds parts of a cache already."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("part-*.safetensors")):
        return
    partial = folder / "cache.json.partial"
    partial.write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "cache.json")


def _store(batch: Batch, logits_of: Callable, description: Description) -> tuple[torch.Tensor, ...]:
    chunk = max(1, 2**23 // description.tokens)
    parts = []
    for start in range(0, max(1, len(batch.labels)), chunk):
        rows = slice(start, start + chunk)
        logits = logits_of(rows)[:, : description.tokens].float()
        log_p = log_probabilities(logits, description.temperature)
        if log_p.isnan().any():
            raise CacheError(
                f"the teacher {description.teacher} predicts NaN: its weights are damaged, or its "
                "values overflow in 16 bits; try --bf16 in place of --fp16, or neither"
            )
        if description.sampling == "importance":
            bins = sampled_bins(log_p, description.top_k)
        else:
            bins = top_k_with_tail(log_p, description.top_k)
        cross_entropy = torch.nn.functional.cross_entropy(
            logits, batch.labels[rows], reduction="none"
        )
        parts.append((bins.indices.int(), bins.log_p, cross_entropy))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
