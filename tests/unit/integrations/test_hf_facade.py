"""DeepSpeed's names beside the engine: groups, checkpoints, fragments."""

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.dist.training import ds_config
from tests.processes import run_on
from zero import fragments, initialize
from zero.errors import UsageError
from zero.integrations.deepspeed import finder
from zero.integrations.deepspeed.checkpoints import convert_zero_checkpoint_to_fp32_state_dict


def ranks_of_groups(rank: int, world_size: int) -> None:
    groups = finder.FacadeModule("deepspeed.utils.groups")
    with pytest.raises(KeyError):
        groups._get_sequence_parallel_group()
    assert groups._get_data_parallel_rank() == rank
    assert groups._get_data_parallel_world_size() == world_size
    assert groups._get_sequence_parallel_world_size() == 1


def test_every_rank_is_a_data_parallel_rank():
    run_on(2, ranks_of_groups)


def set_by_hand(rank: int, world_size: int, stage: int) -> None:
    """Set `param.grad` in the script, on rank 0 three times as large."""
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    config = ds_config(fp16={"enabled": True, "initial_scale_power": 3, "loss_scale_window": 1})
    config["zero_optimization"]["stage"] = stage
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, optimizer, _, _ = initialize(model=model, optimizer=optimizer, config=config)
    engine.module.weight.grad = torch.full((1, 4), 24.0 if rank == 0 else 8.0, dtype=torch.float16)
    engine.step()
    assert engine.module.weight.grad is None and engine.get_global_grad_norm() == 4
    assert fragments.safe_get_full_fp32_param(model.weight).eq(-2).all()
    assert engine.loss_scale() == 8


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_set_by_hand_counts(stage):
    run_on(2, set_by_hand, stage)


def unnamed(rank: int, world_size: int, folder: str) -> None:
    config = ds_config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine = initialize(model=nn.Linear(2, 1), config=config)[0]
    with pytest.raises(UsageError, match="save_dir"):
        engine.save_checkpoint("")
    engine.backward(engine(torch.ones(1, 2)).mean())
    engine.step()
    engine.save_checkpoint(folder)
    samples, engine.global_samples = engine.global_samples, 0
    engine.load_checkpoint(folder)
    assert engine.global_samples == samples == 1


def test_a_checkpoint_needs_a_folder_and_keeps_the_samples(tmp_path):
    run_on(1, unnamed, str(tmp_path))
    for safe, name in ((False, "pytorch_model.bin"), (True, "model.safetensors")):
        out = tmp_path / "new" / name
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, safe_serialization=safe)
        state = load_file(out / name) if safe else torch.load(out / name)
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        assert shapes == {"weight": (1, 2), "bias": (1,)}


def with_an_unknown_state(rank: int, world_size: int) -> None:
    config = ds_config(optimizer={"type": "Adam", "params": {"lr": 0.1}})
    engine = initialize(model=nn.Linear(2, 2), config=config)[0]
    # No step yet: no state.
    fragments.safe_set_full_optimizer_state(engine.module.weight, torch.ones(2, 2), "exp_avg")
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(UsageError, match="no state 'momentum'; it has exp_avg, exp_avg_sq"):
        fragments.safe_set_full_optimizer_state(engine.module.weight, torch.ones(2, 2), "momentum")
    with pytest.raises(UsageError, match="no backend 'inducter'"):
        engine.compile("inducter")


def attributes(rank: int, world_size: int) -> None:
    model = nn.BatchNorm1d(3)
    config = ds_config(data_types={"buffer_dtype": "bf16"}) | {"log_level": "error"}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = initialize(model=model, optimizer=inner, config=config)[0]
    assert logging.getLogger("zero").level == logging.ERROR
    assert engine.basic_optimizer is inner and engine.running_mean.dtype == torch.bfloat16
    assert engine.num_batches_tracked.dtype == torch.int64
    assert (engine.mp_world_size, engine.seq_parallel_group, engine.autotp_size()) == (1, None, 1)
    message = "neither zero's engine.* nor the model \\(BatchNorm1d\\) has an attribute 'csr_names'"
    with pytest.raises(AttributeError, match=message):
        engine.csr_names  # noqa: B018


def with_hooks(rank: int, world_size: int, stage: int) -> None:
    """A hook from before `initialize` and one from after it halve the gradient."""
    model = nn.Linear(4, 1, bias=False)

    def halve(param: nn.Parameter) -> None:
        param.grad.mul_(0.5)

    model.weight.register_post_accumulate_grad_hook(halve)
    config = ds_config(stage=stage, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    engine = initialize(model=model, config=config)[0]
    engine.module.weight.register_post_accumulate_grad_hook(halve)
    before = fragments.safe_get_full_fp32_param(model.weight).clone()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    after = fragments.safe_get_full_fp32_param(model.weight)
    torch.testing.assert_close(after, before - 0.5)


@pytest.mark.parametrize(
    "check",
    [with_an_unknown_state, attributes, *(partial(with_hooks, stage=stage) for stage in (0, 3))],
)
def test_an_engine(check):
    run_on(1, check)
