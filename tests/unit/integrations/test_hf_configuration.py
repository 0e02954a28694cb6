"""Configuration classes under DeepSpeed's names."""

import json

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

from zero.config import OffloadOptimizerConfig, load_config
from zero.integrations.deepspeed import configuration as facade
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.integrations.deepspeed.utilities import RepeatingLoader, register_grad_hook


def test_a_configuration_by_itself_completes_its_batch_sizes(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 6, "bf16": {"enabled": True}}))
    config = facade.DeepSpeedConfig(path)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (6, 1)
    assert config.bf16.enabled
    config.train_micro_batch_size_per_gpu = 2
    config.gradient_accumulation_steps = None
    config._configure_train_batch_size()
    assert config.gradient_accumulation_steps == 3
    config.gradient_accumulation_steps = 2
    with pytest.raises(AssertionError, match="6 is not train_micro_batch_size_per_gpu 2 x"):
        config._configure_train_batch_size()


class Settings(facade.DeepSpeedConfigModel):
    width: int = 0
    names: list[str] | None = None
    name: str | None = Field(
        None,
        json_schema_extra={
            "deprecated": True,
            "new_param": "names",
            "new_param_fn": lambda name: [name],
        },
    )


def test_a_scripts_own_model_takes_old_names_and_auto():
    settings = Settings(name="one", width="auto")
    assert (settings.names, settings.width) == (["one"], 0)
    with pytest.raises(AssertionError, match="name: old name of names, which is given too"):
        Settings(name="one", names=["one"])
    for wrong in ({"widht": 1}, {"width": "wide"}, {"names": "one"}):
        with pytest.raises(ValidationError):
            Settings(**wrong)


def test_single_settings():
    assert facade.get_gradient_clipping({}) == facade.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert facade.get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert facade.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert (
        OffloadOptimizerConfig(pipeline_write=True).pipeline
        and not OffloadOptimizerConfig().pipeline
    )


def test_a_gradient_hook_sees_the_gradient():
    param, seen = nn.Parameter(torch.ones(2)), []
    handle = register_grad_hook(param, lambda given: seen.append(given.grad.sum().item()))
    (2 * param).sum().backward()
    handle.remove()
    param.sum().backward()
    assert seen == [4.0]


class Untested(torch.optim.SGD):
    pass


def test_an_untested_optimizer_is_refused_on_request():
    model = nn.Linear(2, 2)
    sharded = {"zero_optimization": {"stage": 1}}
    allowed = load_config({"zero_allow_untested_optimizer": True, **sharded})
    refused = load_config({"zero_allow_untested_optimizer": False, **sharded})
    for kind, config in ((Untested, allowed), (torch.optim.SGD, refused)):
        assert (
            type(build_optimizer(config, lambda params, kind=kind: kind(params), None, model))
            is kind
        )
    with pytest.raises(
        ValueError, match="Untested is untested, and zero_allow_untested_optimizer is false"
    ):
        build_optimizer(refused, Untested(model.parameters(), lr=1.0), None, model)


@pytest.mark.parametrize("key", ["loss_scale", "loss_scale_window", "min_loss_scale"])
def test_scales_of_fp16_may_be_text(key):
    assert getattr(facade.DeepSpeedFP16Config(**{key: "3"}), key) == 3
    for value in (True, [], None):
        with pytest.raises(ValidationError, match="must be a number"):
            facade.DeepSpeedFP16Config(**{key: value})


def test_a_loader_that_begins_anew():
    loader = RepeatingLoader([1, 2, 3])
    assert iter(loader) is loader and [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
