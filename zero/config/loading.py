"""`load_config`: reads, checks and types a configuration.

The rules about several keys at once are here too.
"""

import os
from collections.abc import Iterator

from zero.config.keys import AUTO_WITHOUT_DEFAULT, BATCH_KEYS, REMOVED_KEYS, Origin
from zero.config.reading import pop, read, rename_deprecated, take_auto, take_unknown, validate
from zero.config.settings import Config
from zero.config.sharding import ZeroConfig
from zero.errors import UsageError


def load_config(source: str | os.PathLike | dict, *, allow_auto: bool = False) -> Config:
    """Read and check a DeepSpeed configuration.

    Args:
        source: path of a JSON file, a dict (left unchanged), a JSON string, or a JSON string in
        URL-safe base64. allow_auto: accept "auto" where transformers and accelerate fill it in
        later; the key then has its default
            (batch sizes: None). Without it, "auto" is an error where DeepSpeed has no default to
            fall back on.

    Raises:
        ValueError: one line for each thing wrong, naming file, dotted key, what was expected and
        the nearest key.
    """
    place, raw = read(source)
    data, deprecated, problems = rename_deprecated(raw, overriding=isinstance(source, dict))
    for key, reason in REMOVED_KEYS.items():
        # A section that is switched off is harmless.
        if (value := pop(data, key)) is not None and value[0] != {"enabled": False}:
            problems.setdefault(key, reason)
    ignored, unknown = take_unknown(data, Config)
    if ignored and not data and not unknown:
        problems[ignored[0]] = (
            "neither this nor any other key is one of DeepSpeed's: is this the right file?"
        )
    auto = take_auto(data, Config)
    config, found = validate(data, Config)
    problems |= found | unknown
    for section in ("optimizer", "scheduler"):
        # The type decides which settings exist, so messages about them would mislead.
        if f"{section}.type" in problems:
            problems = {
                key: text
                for key, text in problems.items()
                if not key.startswith(f"{section}.params.")
            }
    if config is not None:
        config._origin = Origin(place, raw, frozenset(auto), ignored, deprecated)
        for key, message in _contradictions(config, allow_auto, unknown={*auto, *problems}):
            problems.setdefault(key, message)
    if problems:
        raise UsageError(
            "\n".join(f"{place}: {key}: {message}" for key, message in problems.items())
        )
    return config


def _contradictions(
    config: Config, allow_auto: bool, unknown: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for keys that contradict each other.

    ``unknown`` keys have no value yet.
    """
    if not allow_auto:
        for key in AUTO_WITHOUT_DEFAULT:
            if key in config.auto:
                yield key, "is still 'auto' and has no default; set a value"
    yield from _precision_contradictions(config)
    zero = config.zero_optimization
    if not config.managed_gradient_accumulation and zero.stage < 2 and zero.overlap_comm:
        yield (
            "managed_gradient_accumulation",
            "false supports zero_optimization.overlap_comm only with ZeRO stage 2 or 3; below, "
            "gradients are reduced "
            "in step() alone: set overlap_comm to false",
        )
    yield from _offload_contradictions(
        config.zero_optimization, "zero_optimization.stage" not in unknown
    )
    if config.optimizer is not None:
        yield from config.optimizer.contradictions()
    if config.scheduler is not None:
        yield from config.scheduler.contradictions(config.auto)
    train, micro, steps = (getattr(config, key) for key in BATCH_KEYS)
    if train is not None and train % ((micro or 1) * (steps or 1)):
        yield "train_batch_size", config._batch_mismatch(None)


def _precision_contradictions(config: Config) -> Iterator[tuple[str, str]]:
    fp16 = config.fp16
    if fp16.enabled and config.bf16.enabled:
        yield "bf16.enabled", "fp16.enabled is true too; choose one of them"
    initial = 2**fp16.initial_scale_power
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > initial:
        yield (
            "fp16.min_loss_scale",
            f"{fp16.min_loss_scale} is above 2 ** initial_scale_power = {initial}",
        )


def _offload_contradictions(zero: ZeroConfig, stage_known: bool) -> Iterator[tuple[str, str]]:
    for name, minimum in (("offload_param", 3), ("offload_optimizer", 1)):
        offload = getattr(zero, name)
        if offload is None or offload.device == "none":
            continue
        key = f"zero_optimization.{name}.device"
        if offload.device == "nvme" and not offload.nvme_path:
            yield (
                f"zero_optimization.{name}.nvme_path",
                "is missing, and device is nvme; name a folder on a fast disk",
            )
        # Below stage 3 `offload_param` is no error: accelerate's plugin writes it at every stage.
        if stage_known and zero.stage < minimum and name == "offload_optimizer":
            yield key, f"needs zero_optimization.stage of at least {minimum}, got {zero.stage}"
