"""Whole models in files: writes a model folder for `from_pretrained` part by part, and reads a
checkpoint in a single process without an engine.

Everything that is read from a checkpoint is verified. `consolidate` holds at most `PART` elements
of the model in memory, or one parameter that was split over ranks."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from zero.checkpoint import disk
from zero.checkpoint import folder as folders
from zero.checkpoint.blocks import header
from zero.checkpoint.files import (
    CheckpointReader,
    Slice,
    TensorSpec,
    bytes_of,
    name_in,
    open_checkpoint,
)
from zero.checkpoint.values import dtype_name, dtype_of
from zero.core.sharded_param import ShardedParameter
from zero.errors import UsageError

logger = logging.getLogger("zero")

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MAX_FILE_BYTES = 5 * 10**9
# The number of elements of a tensor that are read and written at a time.
PART = 1 << 22


# -- model folders


def write_model(
    folder: Path,
    tensors: Sequence[TensorSpec],
    parts: Iterator[torch.Tensor],
    config: dict | None,
    filename: str = MODEL_FILE,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write a model whose values come part by part, and return the files written.

    Args:
        folder: created if necessary. Other files of an earlier model of the same name are removed
            at the end.
        tensors: the tensors to write.
        parts: their values in that order, each a tensor or a part of one, in host memory and in the
            dtype announced for it.
        config: the content of `config.json` without the dtype, or None if there is none.
        filename: the name of a single file, from which the names of several files and of their
            index are derived as in transformers.
        max_file_bytes: files are split so that none is larger, unless a single tensor is.

    Raises:
        OSError: the files cannot be written. They have hidden names until the end, and none is left
            after an error.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    disk.require_room(folder, nbytes, "the model")
    files = _divide(tensors, filename, max_file_bytes)
    try:
        for name, of_file in files.items():
            disk.remove(folder / f".{name}")
            with disk.create(folder / f".{name}") as descriptor:
                begin = header((t.name, dtype_name(t.dtype), t.shape) for t in of_file)
                position = disk.write(descriptor, memoryview(begin), 0)
                for tensor in of_file:
                    end = position + tensor.nbytes
                    while position < end:
                        position = disk.write(descriptor, bytes_of(next(parts)), position)
                    assert position == end, tensor.name
        written = [(folder / f".{name}").replace(folder / name) for name in files]
    finally:
        for name in files:
            (folder / f".{name}").unlink(missing_ok=True)
    if len(files) > 1:
        places = {tensor.name: name for name, of_file in files.items() for tensor in of_file}
        index = {"metadata": {"total_size": nbytes}, "weight_map": places}
        written.append(_write_json(folder / f"{filename}.index.json", index))
    stem = re.escape(filename.removesuffix(".safetensors"))
    for path in folder.iterdir():
        of_model = re.fullmatch(
            stem + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", path.name
        )
        if of_model and path not in written:
            path.unlink()
    if config is not None:
        floats = (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
        config = config | {"dtype": dtype_name(next(floats, torch.float32))}
        written.append(_write_json(folder / "config.json", config))
    return written


def _divide(
    tensors: Sequence[TensorSpec], filename: str, max_file_bytes: int
) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each file, by its name."""
    files: list[list[TensorSpec]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.nbytes for other in files[-1]) + tensor.nbytes > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {filename: files[0]}
    name = filename.removesuffix(".safetensors") + "-{:05}-of-{:05}.safetensors"
    return {name.format(number, len(files)): file for number, file in enumerate(files, 1)}


def _write_json(path: Path, content: dict) -> Path:
    disk.replace_text(path, json.dumps(content, indent=2) + "\n")
    return path


def skeleton(folder: Path) -> Any:
    """Build the model of a folder's `config.json`, unquantized and without memory for weights."""
    import transformers  # takes seconds to import

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # of any kind: the file is not ours
        line = " ".join(str(error).split())
        raise UsageError(f"{folder}: the model cannot be built: {line}") from error
    vars(config).pop("quantization_config", None)
    if (kind := getattr(transformers, (config.architectures or [""])[0], None)) is None:
        raise UsageError(
            f"{folder / 'config.json'}: transformers has no class {config.architectures}, which "
            "would say what the parameters are"
        )
    with torch.device("meta"):
        return kind(config)


# -- a checkpoint's model


def open_at(path: str | os.PathLike, tag: str | None = None) -> CheckpointReader:
    """Return a reader of a checkpoint. `path` is its own folder, or a folder that contains it, such
    as `checkpoint-500`.

    Raises ValueError if there is no checkpoint, or if a file of it is missing.
    """
    return open_checkpoint(folders.located(Path(path), tag))


def _model_tensors(
    reader: CheckpointReader, dtype: torch.dtype | None, exclude_frozen: bool = False
) -> dict[str, TensorSpec]:
    """Return what the model's state dict has, by the keys in the checkpoint, with tied ones once.

    Floating-point tensors get `dtype`, or with None the dtype in which they are trained.
    """
    tensors, manifest = {}, reader.manifest
    first = {name: key for key, name in reversed(manifest.saved.items())}
    # The state dict may have a parameter's name for another tensor, such as its transpose.
    weights = {n: entry for n, entry in manifest.parameters.items() if n not in manifest.plain}
    for kind, entries in (("weights", weights), ("plain", manifest.plain)):
        for name, entry in entries.items():
            if name in first and (kind == "plain" or entry.trainable or not exclude_frozen):
                own = dtype_of(entry.dtype)
                as_dtype = dtype if dtype is not None and own.is_floating_point else own
                spec = TensorSpec(first[name], torch.Size(entry.shape), as_dtype)
                tensors[f"{kind}/{name}"] = spec
                reader.check(f"{kind}/{name}", entry.numel)
    return tensors


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the whole model's state dict in fp32 in host memory. Tied weights are a single tensor
    under each of their names.

    Args:
        checkpoint_dir: the folder given to `save_checkpoint`, or the checkpoint's own folder.
        tag: the checkpoint's tag. Default: the latest.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged.
    """
    return _state_dict(open_at(checkpoint_dir, tag), exclude_frozen_parameters)


def _state_dict(reader: CheckpointReader, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    state, slices = {}, []
    for key, tensor in _model_tensors(reader, torch.float32, exclude_frozen).items():
        state[name_in(key)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        slices.append(Slice.whole(key, state[name_in(key)]))
    reader.read(slices)
    return {key: state[name] for key, name in reader.manifest.saved.items() if name in state}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights, fp32 masters if there are any, into an ordinary model on the
    host, and return it.

    Raises:
        ValueError: there is no such checkpoint, or a file of it is damaged.
        RuntimeError: the names or shapes differ.
    """
    reader = open_at(checkpoint_dir, tag)
    model.cpu().load_state_dict(_state_dict(reader), strict=_is_whole(reader))
    return model


def _is_whole(reader: CheckpointReader) -> bool:
    """Whether the checkpoint has all weights of its model, including frozen ones."""
    return not (reader.manifest.frozen_excluded or reader.manifest.base)


def consolidate(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: bool = False,
) -> list[Path]:
    """Write the model of a training checkpoint as safetensors, with index and `config.json`, for
    `from_pretrained`. For a checkpoint of PEFT adapters, write the adapters, for
    `PeftModel.from_pretrained`.

    Args:
        checkpoint: the checkpoint's folder, or a folder that contains it.
        out: the folder to write to, created if necessary.
        dtype: the dtype of floating-point weights, rounded from the fp32 masters. None means the
            dtype in which they are trained.
        max_file_bytes: files are split so that none is larger, unless a single tensor is. An
            adapter is always one file.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns the files written. Raises ValueError for a damaged or missing checkpoint, for one that
    lacks required frozen weights, and for a folder that already contains a model, and OSError if
    the files cannot be written. No incomplete file is left under a final name."""
    out = Path(out)
    require_no_model(out)
    reader = open_at(checkpoint)
    tensors = _model_tensors(reader, dtype)
    if reader.manifest.adapters:
        return _write_adapters(reader, tensors, out, progress)
    if not _is_whole(reader):
        raise UsageError(
            f"{checkpoint} holds the trained weights without the frozen ones, so that no complete "
            "model can be written from it: build the model as for the training, and load them with "
            "load_state_dict_from_zero_checkpoint"
        )
    config, parts = reader.manifest.hf_config, _parts(reader, tensors.items(), progress)
    return write_model(out, list(tensors.values()), parts, config, max_file_bytes=max_file_bytes)


def require_no_model(folder: Path) -> None:
    if existing := sorted(path.name for path in folder.glob("*model*.safetensors*")):
        raise UsageError(
            f"{folder} already holds a model ({existing[0]}); choose another folder or remove it"
        )


def _parts(
    reader: CheckpointReader, tensors: Collection[tuple[str, TensorSpec]], progress: bool
) -> Iterator[torch.Tensor]:
    """Yield the values of tensors, given with their keys in the checkpoint, part by part."""
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    with tqdm(
        total=nbytes,
        unit="B",
        unit_scale=True,
        desc="consolidate",
        disable=None if progress else True,
    ) as bar:
        for key, tensor in tensors:
            numel = tensor.shape.numel()
            # A tensor that is stored in parts is joined as a whole.
            step = PART if reader.stored_cut(key) is None else numel
            for start in range(0, numel, step):
                part = torch.empty(min(step, numel - start), dtype=tensor.dtype, device="cpu")
                reader.read([Slice(key, numel, start, part)])
                bar.update(part.nbytes)
                yield part
                del part  # so that no two exist at the same time


def _write_adapters(
    reader: CheckpointReader, stored: Mapping[str, TensorSpec], out: Path, progress: bool
) -> list[Path]:
    """Write each adapter to the folder in which PEFT would save it: the one called "default" to
    `out` itself, others below it.
    """
    keys, tied = {name_in(key): key for key in stored}, reader.manifest.tied
    tensors: dict[str, list[tuple[str, TensorSpec]]] = {}
    for adapter, described in reader.manifest.adapters.items():
        tensors[adapter] = []
        for name, source in described.tensors.items():
            if source is None:
                raise UsageError(
                    f"{reader.folder}: PEFT computes {name!r} of the adapter {adapter!r} when it "
                    "saves, so that it is not in the checkpoint: save the adapter from the run, as "
                    "the Trainer does beside each checkpoint"
                )
            key = keys.get(tied.get(source, source))
            if key is None:
                logger.warning(
                    "the adapter %r is written without %s, which is frozen and not in the "
                    "checkpoint: the base model must have it",
                    *(adapter, name),
                )
            else:
                tensors[adapter].append((key, replace(stored[key], name=name)))
    written = []
    for adapter, of_adapter in tensors.items():
        folder = out if adapter == "default" else out / adapter
        specs, parts = [spec for _, spec in of_adapter], _parts(reader, of_adapter, progress)
        written += write_model(folder, specs, parts, None, ADAPTER_FILE, sys.maxsize)
        config = reader.manifest.adapters[adapter].config
        written.append(_write_json(folder / ADAPTER_CONFIG, config))
    return written


# -- PEFT's adapters: the names under which PEFT saves their tensors, and their configuration, so
# that `consolidate` can write what `save_pretrained` would have written


def describe_adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return each adapter's configuration, and the model's name of each tensor that PEFT saves.

    The name is None where PEFT computes the tensor from several parameters. Nothing is gathered.
    The result is empty if the model is not a PEFT model."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return {}
    from peft import get_peft_model_state_dict  # installed, because the model is a PEFT model

    # PEFT selects by name, so a single number, expanded to the shape, can stand for each tensor.
    stand_ins = {
        name: torch.zeros((), device="cpu").expand(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    names = {id(value): name for name, value in stand_ins.items()}
    found = {}
    for adapter, config in model.peft_config.items():
        saved = get_peft_model_state_dict(model, dict(stand_ins), adapter_name=adapter)
        found[adapter] = {
            "config": _stored_config(model, config),
            "tensors": {
                key: names.get(id(value)) or _name_of_equal(model, value)
                for key, value in saved.items()
            },
        }
    return found


def _name_of_equal(model: nn.Module, computed: torch.Tensor) -> str | None:
    """Return the unsharded parameter with these values. For prompts, PEFT returns a copy."""
    for name, param in model.named_parameters():
        is_candidate = param.requires_grad and not isinstance(param, ShardedParameter)
        if is_candidate and param.shape == computed.shape:
            if torch.equal(param.detach().to(computed), computed):
                return name
    return None


def _stored_config(model: Any, config: Any) -> dict[str, Any]:
    """Return what PEFT writes to `adapter_config.json`."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    kind, mapping = type(model.get_base_model()), None
    if config.task_type is None:
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text())
