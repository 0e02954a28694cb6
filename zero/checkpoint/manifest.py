"""`checkpoint.json`, which says what a checkpoint contains, and where.

Its types are checked before anything else reads it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero.checkpoint import disk
from zero.errors import DamagedCheckpointError

MANIFEST = "checkpoint.json"
FORMAT = "zero-checkpoint"
FORMAT_VERSION = 2
DATA_FILE = "rank{:05d}.safetensors"
# The number of a file's bytes that share one checksum.
BLOCK = 1 << 20
# The only key of an object that stands for a value that JSON does not have; see
# `zero.checkpoint.values`.
KIND = "$type"

# The dtypes that a file can have: safetensors' names, by torch's.
STORABLE = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
    **{f"float8_{kind}": f"F8_{kind.upper()}" for kind in ("e4m3fnuz", "e5m2", "e5m2fnuz")},
    "float8_e4m3fn": "F8_E4M3",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
}


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8


def _is_storable(dtype: str) -> str:
    if dtype not in STORABLE:
        raise ValueError(f"unknown dtype {dtype!r} of a tensor in a file")
    return dtype


def _is_float(dtype: str) -> bool:
    return "float" in dtype


Dtype = Annotated[str, AfterValidator(_is_storable)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
FileName = Annotated[str, Field(pattern=r"^rank[0-9]{5,9}\.safetensors$")]


def damaged(path: Path, why: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} is damaged: {why}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class File(_Part):
    bytes: Count
    sums: list[str]

    @model_validator(mode="after")
    def _sums_are_of_all_blocks(self) -> File:
        if len(self.sums) != -(-self.bytes // BLOCK):
            raise ValueError(f"{len(self.sums)} sums for {self.bytes} bytes")
        return self


class StoredSlice(NamedTuple):
    """`numel` elements from `start` on, at byte `position` of `file`."""

    start: Count
    numel: Count
    file: FileName
    position: Count

    @property
    def end(self) -> int:
        return self.start + self.numel


class StoredTensor(_Part):
    dtype: Dtype
    numel: Count
    slices: list[StoredSlice]


class Value(_Part):
    """A parameter or a buffer. `dtype`: the dtype in which it is used. `group`: the index of its
    param group, or None.

    `cut`: (dimension, blocks, parts) if it is stored in parts; see `zero.checkpoint.files`.
    """

    shape: list[Count]
    dtype: Dtype
    trainable: bool = False
    group: Count | None = None
    cut: list[Count] | None = Field(default=None, min_length=3, max_length=3)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class StateKey(_Part):
    """One kind of optimizer state: `dtype` if it is sliced like the parameter, otherwise a number
    for each parameter.

    `whole` describes state that is neither, by parameter: see `zero.checkpoint.values.describe`.
    """

    dtype: str | None = None
    numbers: dict[str, Any] | None = None
    whole: dict[str, Any] | None = None


class OptimizerState(_Part):
    classes: list[str] = Field(min_length=1)
    groups: list[dict[str, Any]]
    state: dict[str, StateKey]


class Adapter(_Part):
    """A PEFT adapter. `tensors`: the model's names of the tensors, by their names in PEFT's file;
    see `zero.checkpoint.models`.
    """

    config: dict[str, Any]
    tensors: dict[str, str | None]


class Manifest(_Part):
    """The content of `checkpoint.json`.

    `tied`: {other name: name} of parameters. `state_dict`: {key in the model's state dict: name},
    which earlier versions did not store. `base`: has the names of quantized
    layers, whose weights are not stored; earlier versions identified these by numbers.
    """

    format: Literal["zero-checkpoint"]
    version: int
    torch: str
    time: str
    tag: str
    world_size: Count
    stage: int
    global_steps: Count
    global_samples: Count
    micro_steps: Count
    skipped_steps: Count
    gradient_accumulation_steps: Count
    loss_scaler: Any
    lr_scheduler: Any
    client_state: dict[str, Any]
    random_states: list[Any]
    frozen_excluded: bool
    hf_config: dict[str, Any] | None
    parameters: dict[str, Value]
    plain: dict[str, Value]
    tied: dict[str, str]
    state_dict: dict[str, str] = {}
    base: dict[str, list[Count]] = {}
    adapters: dict[str, Adapter] = {}
    optimizer: OptimizerState | None
    files: dict[FileName, File]
    tensors: dict[str, StoredTensor]

    @property
    def saved(self) -> dict[str, str]:
        """The names of the parameters and buffers that the model's state dict has, by their keys
        in it.
        """
        params = self.state_dict or {name: name for name in self.parameters} | self.tied
        return params | {name: name for name in self.plain}

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        if len(self.random_states) != self.world_size:
            raise ValueError(f"{len(self.random_states)} random states of {self.world_size} ranks")
        for key, tensor in self.tensors.items():
            tensor.slices.sort()
            size, position = itemsize(tensor.dtype), 0
            for each in tensor.slices:
                if each.start != position or not each.numel:
                    raise ValueError(
                        f"{key}: elements {position} to {each.start} are nowhere, or there twice"
                    )
                file, end = self.files.get(each.file), each.position + each.numel * size
                if file is None or end > file.bytes or each.position % size:
                    raise ValueError(f"{key}: {each.file} has no such place")
                position = each.end
            if position != tensor.numel:
                raise ValueError(f"{key}: {position} of {tensor.numel} elements are there")
        return self

    @model_validator(mode="after")
    def _values_fit_their_tensors(self) -> Manifest:
        groups = 0 if self.optimizer is None else len(self.optimizer.groups)
        for name, value in self.parameters.items():
            if value.group is not None and value.group >= groups:
                raise ValueError(f"{name}: there is no param group {value.group}")
            dim, blocks, parts = value.cut or (-1, 1, 1)
            if dim >= len(value.shape) or not blocks or not 0 < parts <= len(self.tensors) + 1:
                raise ValueError(f"{name}: cannot be in the parts {value.cut}")
        values = {f"plain/{name}": value for name, value in self.plain.items()}
        for name, value in self.parameters.items():
            values[f"weights/{name}" if value.cut is None else f"weights/{name}@0"] = value
        for key, value in values.items():
            used = _is_float(value.dtype)
            if key in self.tensors and _is_float(self.tensors[key].dtype) != used:
                raise ValueError(f"{key}: used as {value.dtype}, stored in another kind of dtype")
        return self


def to_text(manifest: dict) -> str:
    """Return the text of the file. Its checksum covers the content as JSON with sorted keys."""
    return json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1)


def _checksum(manifest: dict) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the checked content of `checkpoint.json`.

    Raises:
        DamagedCheckpointError: it is missing, has been changed, or is not a manifest.
        ValueError: another version wrote it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(disk.read(path))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} is missing: this is not a complete checkpoint of zero"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise damaged(path, error) from None
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is int and version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {version}, this version reads only {FORMAT_VERSION}; resume "
            "from it, or consolidate it, with the version of zero that wrote it"
        )
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise damaged(path, "its checksum does not match its content")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        raise damaged(path, f"{place}: {first['msg']}") from None
