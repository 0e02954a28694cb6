"""Merges an adapter of PEFT into the files of its base model, one parameter at a time.

PEFT's own layers do it: the model is built without values, and the values of one parameter are
shown to the layers that adapt it. Weights in bitsandbytes' formats are dequantized first, and
experts that transformers keeps in one parameter are joined for the merge and written one by one."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from zero.checkpoint.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    base_name,
    merged,
    merging_layers,
)
from zero.checkpoint.files import TensorSpec, bytes_of
from zero.checkpoint.models import (
    MAX_FILE_BYTES,
    MODEL_FILE,
    consolidate,
    open_at,
    require_no_model,
    skeleton,
    write_model,
)
from zero.checkpoint.stored import Stored, files_of_index, tensors_of
from zero.checkpoint.values import dtype_of
from zero.core.sharded_param import placeholder, take_over
from zero.errors import UsageError

Tensors = dict[str, torch.Tensor]

# Initializations of LoRA that subtract what the adapter has from the base weights.
_CHANGE_BASE = "pissa", "olora", "corda", "loftq"


def merge(
    checkpoint: str | os.PathLike,
    base: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: bool = False,
) -> list[Path]:
    """Write the model in `base` with an adapter merged into it, for `from_pretrained`, and return
    the files written.

    Args:
        checkpoint: a training checkpoint of one adapter, or a folder that PEFT has written.
        base: the base model's folder.
        out: the folder to write to, created if necessary.
        dtype: the dtype of floating-point weights. None means that of the base.
        max_file_bytes: files are split so that none is larger, unless a single tensor is.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: for a damaged or missing checkpoint, or several adapters in it, if the base's
            files lack what the adapter changes, and if PEFT cannot merge it.
    """
    out, adapter = Path(out), Path(checkpoint)
    require_no_model(out)
    with tempfile.TemporaryDirectory() as folder:
        if not (adapter / ADAPTER_CONFIG).is_file():
            names = list(open_at(checkpoint).manifest.adapters)
            if len(names) != 1:
                raise UsageError(
                    f"{checkpoint} has {len(names)} adapters ({', '.join(names) or 'none'}), and "
                    "one can be merged: write them with consolidate, and name the folder of one"
                )
            adapter = consolidate(checkpoint, folder)[-1].parent
        model = _MergedModel(adapter, Path(base), dtype)
        values = model.values(progress)
        return write_model(out, model.specs, values, model.config, max_file_bytes=max_file_bytes)


class _MergedModel:
    """A base model with an adapter merged into it, under the names that the base's files have.

    Attributes:
        config: the content of its `config.json`.
        specs: names, shapes and dtypes, in the order of the values.
    """

    def __init__(self, adapter: Path, base: Path, dtype: torch.dtype | None):
        self._files = _BaseFiles(base)
        self.config = self._files.config
        model = _without_values(base)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._conversion = _Conversion(model, self._files.tensors)
        self._model = _with_adapter(model, adapter)
        # By the names of the base model. Two names may have the same parameter.
        self._params: dict[str, nn.Parameter] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            own = base_name(self._model, name)
            if own is not None and own in before:
                self._params[own] = param
        self._layers: dict[nn.Parameter, list[Any]] = {}
        for layer in merging_layers(self._model):
            for param in layer.get_base_layer().parameters():
                self._layers.setdefault(param, []).append(layer)
        # Those that the adapter's file has as a whole.
        self._trained = set(self._params.values()) - set(before.values())
        self._require_places(before)
        self.specs = [
            TensorSpec(name, shape, dtype if dtype is not None and own.is_floating_point else own)
            for name, (shape, own) in self._files.tensors.items()
        ]
        self._parts: Tensors = {}  # computed and not yet written

    def _require_places(self, before: dict[str, nn.Parameter]) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in before.items():
            names.setdefault(param, []).append(name)
        changed = self._layers.keys() | self._trained
        for tied in names.values():
            after = {self._params[name] for name in tied}
            named = " and ".join(map(repr, tied))
            if after.isdisjoint(changed):
                continue
            if len(after) > 1:
                raise UsageError(
                    f"the base model ties {named}, and the adapter has a copy of one of them, "
                    "which no model folder can hold: load the adapter with "
                    "PeftModel.from_pretrained, or train it on a base model without ties"
                )
            if not any(name in self._conversion.sources for name in tied):
                raise UsageError(
                    f"the adapter changes {named}, which {self._files.folder} stores under another "
                    "name: load the model, and merge the adapter with PEFT's merge_and_unload"
                )

    @torch.no_grad()
    def values(self, progress: bool) -> Iterator[torch.Tensor]:
        for spec in tqdm(self.specs, desc="merge", unit=" tensors", disable=not progress):
            if spec.name not in self._parts:
                self._parts |= self._merged(spec.name)
            yield self._parts.pop(spec.name).to(spec.dtype)

    def _merged(self, source: str) -> Tensors:
        """Return `source`, and the other tensors of the files that belong to its parameter."""
        name = self._conversion.names[source]
        param = self._params.get(name)
        if param is None or not (param in self._trained or param in self._layers):
            return {source: self._files.read(source)}
        if param in self._trained:
            _, own = self._files.tensors[source]
            value = param.detach().to(own, copy=True)
        else:
            value = self._conversion.join(name, self._files.read)
        # PEFT saves an embedding as a whole, beside the adapter that is to be merged into it.
        if param in self._layers:
            value = merged(self._layers[param], param, value)
        return self._conversion.split(name, value)


class _Conversion:
    """How transformers makes a model's parameters from the tensors in its files: it renames some,
    and joins others, such as those of experts.

    Attributes:
        names: the name of the parameter to which each tensor of the files belongs.
        sources: the reverse.
    """

    def __init__(self, model: Any, stored: Collection[str]):
        self._model = model
        self.names = {name: name for name in stored}
        self._joined: dict[str, Any] = {}
        self._patterns: dict[str, str] = {}
        if find_spec("transformers.core_model_loading") is not None:  # since transformers 5
            self._read_conversions()
        self.sources: dict[str, list[str]] = {}
        for source, name in self.names.items():
            self.sources.setdefault(name, []).append(source)

    def _read_conversions(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        steps = get_model_conversion_mapping(self._model)
        joins = [step for step in steps if isinstance(step, WeightConverter)]
        renames = [step for step in steps if isinstance(step, WeightRenaming)]
        params = self._model.state_dict()
        prefix = self._model.base_model_prefix
        for source in self.names:
            if source in params:
                continue
            name, pattern = rename_source_key(source, renames, joins, prefix, params)
            join = next((step for step in joins if pattern in step.source_patterns), None)
            if name not in params or (join is not None and len(join.target_patterns) > 1):
                continue  # it is written as it is
            self.names[source] = name
            if pattern is not None:
                self._joined[name] = join
                self._patterns[source] = pattern

    def join(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the parameter's values."""
        sources = self.sources[name]
        if name not in self._joined:
            (source,) = sources
            return read(source)
        from transformers.core_model_loading import dot_natural_key

        join = copy.deepcopy(self._joined[name])
        for source in sorted(sources, key=dot_natural_key):
            join.add_tensor(name, source, self._patterns[source], read(source))
        (value,) = join.convert(name, model=self._model, config=self._model.config).values()
        return value

    def split(self, name: str, value: torch.Tensor) -> Tensors:
        """Return the tensors of the files, by their names."""
        sources = self.sources[name]
        if name not in self._joined:
            return dict.fromkeys(sources, value)
        from transformers.core_model_loading import revert_weight_conversion

        parts = revert_weight_conversion(self._model, {name: value})
        assert parts.keys() == set(sources), name
        return parts


class _BaseFiles:
    """The safetensors of a base model, which bitsandbytes may have quantized.

    Attributes:
        folder: where they are.
        config: the content of `config.json`, without the quantization.
        dtype: that of the model.
        tensors: shape and dtype of each tensor by its name, of quantized ones once dequantized.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / f"{MODEL_FILE}.index.json", folder / MODEL_FILE
        for file in (folder / "config.json", index if index.is_file() else single):
            if not file.is_file():
                raise UsageError(
                    f"{file} is missing: name the base model's folder, with safetensors"
                )
        self.config = _json(folder / "config.json")
        quantization = self.config.pop("quantization_config", None) or {}
        if (method := quantization.get("quant_method", "bitsandbytes")) != "bitsandbytes":
            raise UsageError(
                f"{folder} is quantized with {method}, and only weights of bitsandbytes can be "
                "dequantized here: name a folder that has the model in 16 bits"
            )
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        self.dtype = dtype_of(dtype)
        self._stored: dict[str, Stored] = {}
        for file in files_of_index(index) if index.is_file() else [single]:
            self._stored |= tensors_of(file)
        # What decodes a quantized weight.
        self._decoders: dict[str, list[str]] = {}
        for name in self._stored:
            owner, _, last = name.rpartition(".")
            weight = name.partition(".weight.")[0] + ".weight"
            if last in ("SCB", "weight_format"):
                weight = f"{owner}.weight"
            if weight != name and weight in self._stored:
                self._decoders.setdefault(weight, []).append(name)
        hidden = {name for names in self._decoders.values() for name in names}
        self.tensors = {name: self._described(name) for name in self._stored if name not in hidden}

    def _described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        shape, dtype = torch.Size(self._stored[name].shape), self._stored[name].dtype
        if name not in self._decoders:
            return shape, dtype
        for decoder in self._decoders[name]:
            if ".quant_state." in decoder:
                state = json.loads(bytes_of(self._stored[decoder].values()).tobytes())
                shape = torch.Size(state["shape"])
        return shape, self.dtype

    def read(self, name: str) -> torch.Tensor:
        value = self._stored[name].tensor()
        if name not in self._decoders:
            return value
        from bitsandbytes import functional

        decoders = {decoder: self._stored[decoder].tensor() for decoder in self._decoders[name]}
        owner = name.removesuffix("weight")
        if (scales := decoders.get(f"{owner}SCB")) is not None:
            return functional.int8_vectorwise_dequant(value, scales).to(self.dtype)
        state = functional.QuantState.from_dict(decoders, torch.device("cpu"))
        return functional.dequantize_4bit(value, state).to(self.dtype)


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is damaged: {error}") from None


def _without_values(folder: Path) -> Any:
    """Build the base model with placeholders, which take no memory."""
    model = skeleton(folder)
    for param in model.parameters():
        # PEFT would round an adapter to the dtype of its base, before it computes in fp32.
        take_over(param, placeholder(param.shape, torch.float32, torch.device("cpu")))
    return model


def _with_adapter(model: Any, adapter: Path) -> Any:
    import peft

    config = adapter / ADAPTER_CONFIG
    if (name := _json(config).get("peft_type")) not in list(peft.PeftType):
        raise UsageError(f"{config}: peft_type is {name!r}, which the installed PEFT does not have")
    if not any((adapter / name).is_file() for name in (ADAPTER_FILE, "adapter_model.bin")):
        raise UsageError(
            f"{adapter / ADAPTER_FILE} is missing: name the folder that PEFT has written"
        )
    if (adapter / ADAPTER_FILE).is_file():
        tensors_of(adapter / ADAPTER_FILE)  # it is checked
    kind = peft.PeftConfig.from_pretrained(str(adapter))
    if kind.is_prompt_learning:
        raise UsageError(
            f"{adapter} has prompts and no weights to merge: load it with PeftModel.from_pretrained"
        )
    init = getattr(kind, "init_lora_weights", None)
    if isinstance(init, str) and init.lower().startswith(_CHANGE_BASE):
        raise UsageError(
            f"{config}: init_lora_weights is {init!r}, which changes the base model before the "
            "training: load the model, and merge the adapter with PEFT's merge_and_unload"
        )
    adapted = peft.PeftModel(model, kind, low_cpu_mem_usage=True)
    try:
        result = adapted.load_adapter(
            adapter, "default", low_cpu_mem_usage=True, torch_device="cpu"
        )
        wrong = [*result.missing_keys, *result.unexpected_keys]
    except RuntimeError as error:  # shapes differ
        wrong = [str(error).splitlines()[-1].strip(" \t.")]
    if wrong:
        raise UsageError(
            f"{adapter} does not fit the base model: {wrong[0]}. Name the model that it was "
            "trained on. If the run resized the vocabulary, resize and save the base model first"
        )
    layers = (layer.get_base_layer() for layer in merging_layers(adapted))
    if any(param.dtype != torch.float32 for layer in layers for param in layer.parameters()):
        # An embedding that the file has as a whole: PEFT has rounded its adapter to its dtype.
        peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(adapter), "cpu"))
    return adapted
