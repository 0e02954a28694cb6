"""DeepSpeed's classes and functions around a configuration.

What a key means, and its default, is in `zero.config`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from zero.comm import world
from zero.config import BF16Config, Config, FP16Config, LeafModuleConfig, ZeroConfig, load_config
from zero.config.keys import Names
from zero.config.reading import rename_deprecated
from zero.errors import UsageError
from zero.optim.relocation import STATES

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER = (
    "adagrad",
    "adam",
    "adamw",
    "lion",
)
GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT = Config().gradient_clipping, Config().log_level

# The values of `device` in the offload sections, and what `engine.offload_states` takes, as
# enumerations.
OffloadDeviceEnum = Enum(
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", {name: name for name in STATES}, type=str)

# Mixtures of experts, in which ranks may choose different experts. Their blocks are gathered as a
# whole anyway.
DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{model}.modeling_{model}.{name}SparseMoeBlock"
    for model, name in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
    )
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def get_gradient_clipping(config: dict[str, Any]) -> float:
    """`gradient_clipping` of a configuration."""
    return load_config(config).gradient_clipping


def get_log_level(config: dict[str, Any]) -> str | None:
    """`log_level` of a configuration."""
    return load_config(config).log_level


def get_bfloat16_config(config: dict[str, Any]) -> BF16Config:
    """The section `bf16` of a configuration."""
    return load_config(config).bf16


class DeepSpeedConfig:
    """A configuration without an engine.

    Missing batch sizes are computed; attributes are those of `Config`.
    """

    def __init__(
        self, config: object, mpu: object | None = None, mesh_device: object | None = None
    ):
        vars(self)["_settings"] = load_config(config)
        self._configure_train_batch_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_settings"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._settings, name, value)

    def _configure_train_batch_size(self) -> None:
        self._settings.resolve_batch(world.get_world_size())


class DeepSpeedConfigModel(BaseModel):
    """The base of configurations that scripts define: unknown keys are errors, "auto" stands for
    the default.

    A field with `json_schema_extra={"deprecated": True, "new_param": NEW, "new_param_fn": CONVERT}`
    is an old name of the field NEW, which gets CONVERT(value). Both at once are an error."""

    model_config = ConfigDict(
        extra="forbid",
        arbitrary_types_allowed=True,
        populate_by_name=True,
        protected_namespaces=(),
        use_enum_values=True,
        validate_assignment=True,
        validate_default=True,
    )

    def __init__(self, strict: bool = False, **data: Any):
        data = {key: value for key, value in data.items() if strict or value != "auto"}
        for old, field in type(self).model_fields.items():
            extra = field.json_schema_extra or {}
            if old not in data or not extra.get("deprecated") or "new_param" not in extra:
                continue
            if extra["new_param"] in data:
                raise UsageError(
                    f"{old}: old name of {extra['new_param']}, which is given too; delete {old}"
                )
            data[extra["new_param"]] = extra.get("new_param_fn", lambda value: value)(data.pop(old))
        super().__init__(**data)


class DeepSpeedZeroLeafModuleConfig(LeafModuleConfig):
    """`zero_optimization.leaf_module` as a class of its own, with DeepSpeed's defaults."""

    classes: Names = DEFAULT_LEAF_MODULE_CLASSES


class DeepSpeedFP16Config(FP16Config):
    """`fp16` as a class of its own, which takes scales as text too."""

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, str):
            return float(value)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"must be a number, got {value!r}")
        return value


class DeepSpeedZeroConfig(ZeroConfig):
    """`zero_optimization` as a class of its own: takes old names too, and answers to those without
    `stage3_`.
    """

    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(
        default_factory=DeepSpeedZeroLeafModuleConfig
    )

    def __init__(self, **settings: Any):
        data, _, problems = rename_deprecated({"zero_optimization": settings})
        if problems:
            raise ValueError(f"{problems[0][0]}: {problems[0][1]}")
        super().__init__(**data["zero_optimization"])

    def __getattr__(self, name: str) -> Any:
        if f"stage3_{name}" in type(self).model_fields:
            return getattr(self, f"stage3_{name}")
        return super().__getattr__(name)
