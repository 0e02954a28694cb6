"""Methods and names of DeepSpeed that scripts call around a step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import zero
from tests.processes import run_on
from tests.unit.integrations.test_names import METHODS, names_of
from zero import fragments, initialize
from zero.errors import UsageError
from zero.integrations.deepspeed import finder, leaf

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def make(stage: int = 2, **sections):
    zero = CONFIG["zero_optimization"] if stage == 2 else {"stage": stage}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = CONFIG | {"zero_optimization": zero} | sections
    return initialize(model=model, model_parameters=model.parameters(), config=config)[:2]


def steps(engine, count: int) -> list[int]:
    """The number of steps after each of `count` micro-batches."""
    found = []
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        found.append(engine.global_steps)
    return found


def settings_are_methods(rank: int, world_size: int) -> None:
    engine, _ = make()
    assert engine.train_batch_size() == 4 and engine.train_micro_batch_size_per_gpu() == 2
    assert engine.gradient_accumulation_steps() == engine.zero_optimization_stage() == 2
    assert engine.zero_optimization() and not engine.fp16_enabled()
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_offload_param() is None
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
    assert engine.communication_data_type == torch.float32 and not engine.dynamic_loss_scale()
    assert not engine.wall_clock_breakdown() and engine.get_mom() == [(0.8, 0.9)]
    assert engine.log_level() is None
    with pytest.raises(AttributeError, match="nor the model.*'no_such_setting'"):
        engine.no_such_setting()


def methods_work_or_say_what_to_use(rank: int, world_size: int) -> None:
    engine, _ = make()
    missing = {}
    for name in names_of()[METHODS]:
        try:
            getattr(engine, name)
        except AttributeError as error:
            missing[name] = str(error).partition(f"attribute {name!r}; ")[2]
    assert all(missing.values()) and len(missing) < 100, missing
    for name, instead in (
        ("allreduce_bucket", "backward has summed the gradients"),
        ("autotuning_metric", "zero plan"),
        ("get_model_parallel_rank", "deepspeed.utils.groups"),
        ("zenflow_config", "engine.config"),
    ):
        assert instead in missing[name]
    assert engine.zero_reduce_bucket_size() == 500_000_000 and engine.flops_profiler_detailed()
    assert engine.zero_hpz_partition_size() == 1 and engine.mpu is None


def the_batch_changes_between_steps(rank: int, world_size: int) -> None:
    engine, _ = make()
    assert steps(engine, 3) == [0, 1, 1]
    with pytest.raises(UsageError, match="between two steps"):
        engine.set_train_batch_size(6)
    assert steps(engine, 1) == [2]
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    assert steps(engine, 6) == [2, 2, 3, 3, 3, 4]
    assert engine.global_samples == 2 * 4 + 2 * 6
    engine.set_train_micro_batch_size(4)
    assert engine.get_batch_info() == (12, 4, 3)
    with pytest.raises(UsageError, match="5 is not a multiple of 4"):
        engine.set_train_batch_size(5)


def weights_are_loaded_into_an_engine(rank: int, world_size: int, stage: int) -> None:
    engine, _ = make(stage, bf16={"enabled": True})
    values = {name: torch.full(p.shape, 0.5) for name, p in engine.module.named_parameters()}
    engine.load_module_state_dict(values)
    (weight, *_) = engine.module.parameters()
    assert fragments.safe_get_full_fp32_param(weight).eq(0.5).all()
    if stage == 3:
        with pytest.raises(UsageError, match="save_16bit_model"):
            engine.module_state_dict()
    else:
        assert engine.module_state_dict()["0.weight"].eq(0.5).all()


def gradients_by_parameter(rank: int, world_size: int) -> None:
    engine, optimizer = make(gradient_accumulation_steps=1)
    assert optimizer.averaged_gradients == optimizer.get_fp32_grad_partitions() == {}
    engine.backward(engine(torch.ones(2, 4)).sum())
    (parts,) = optimizer.averaged_gradients.values()
    expected = [fragments.safe_get_full_grad(param).view(-1) for param in engine.parameters()]
    assert [part.numel() for part in parts] == [16, 4, 4, 1]
    assert all(map(torch.equal, parts, expected)) and parts[3].item() == 2.0
    assert [*optimizer.get_fp32_grad_partitions()[0]] == [0, 1, 2, 3]


def what_scripts_read_of_the_optimizer(rank: int, world_size: int) -> None:
    engine, optimizer = make(fp16={"enabled": True, "initial_scale_power": 3})
    assert optimizer.cur_scale == optimizer.loss_scaler.cur_scale == 8
    assert optimizer.dynamic_loss_scale and optimizer._global_grad_norm is None
    assert optimizer.loss_scale_config.scale_window == 1000 and not optimizer.loss_scaler.cur_iter
    (master,) = {each.dtype for each in optimizer.single_partition_of_fp32_groups}
    assert master == torch.float32
    engine.set_lr(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.offload_states(device="none")
    engine._backward_epilogue()
    with pytest.raises(AssertionError, match="Give initialize all groups"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    "check",
    [
        settings_are_methods,
        methods_work_or_say_what_to_use,
        gradients_by_parameter,
        the_batch_changes_between_steps,
        *(partial(weights_are_loaded_into_an_engine, stage=stage) for stage in (0, 2, 3)),
        what_scripts_read_of_the_optimizer,
    ],
)
def test_an_engine(check: Callable[[int, int], None]):
    run_on(1, check)


def test_leaves_are_marked_and_unmarked():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"gate": nn.Linear(2, 2)}))
    assert leaf.set_z3_leaf_modules_by_name(model, ["0", "x"]) == ([model[0]], ["x"])
    assert leaf.set_z3_leaf_modules_by_suffix(model, ["gate"])[1] == []
    assert leaf.get_z3_leaf_modules(model) == [model[0], model[1]["gate"]]
    assert leaf.unset_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[1]["gate"]]
    assert not leaf.z3_leaf_module(model[0]) and not leaf.get_z3_leaf_modules(model)
    with pytest.raises(UsageError, match="no module named x, y"):
        leaf.set_z3_leaf_modules_by_name(model, ["x", "y"])


def test_names_that_frameworks_import():
    schedules = finder.FacadeModule("deepspeed.runtime.lr_schedules")
    assert (schedules.WARMUP_LR, schedules.WARMUP_NUM_STEPS) == ("WarmupLR", "warmup_num_steps")
    facade = finder.FacadeModule("deepspeed")
    assert issubclass(facade.DeepSpeedConfigError, ValueError) and facade.__git_hash__
    assert finder.FacadeModule("deepspeed.runtime.config").ADAMW_OPTIMIZER == "adamw"
    assert finder.FacadeModule("deepspeed.zero").MiCS_Init is zero.Init
    sections = finder.FacadeModule("deepspeed.runtime.zero.config")
    made = sections.DeepSpeedZeroConfig(stage=2, offload_optimizer={})
    assert isinstance(made.offload_optimizer, sections.DeepSpeedZeroOffloadOptimizerConfig)
    with pytest.raises(facade.DeepSpeedConfigError):
        facade.DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})
    assert facade.DeepSpeedConfig({"train_batch_size": 3}).train_micro_batch_size_per_gpu == 3
    assert facade.DeepSpeedConfig({}).train_batch_size is None
    builders = finder.FacadeModule("deepspeed.ops.op_builder")
    assert finder.FacadeModule("deepspeed.ops").__compatible_ops__[builders.FusedLambBuilder.NAME]
    builders.CPUAdamBuilder().load()


def test_names_that_are_imported_and_not_used_are_errors_when_they_are_called():
    """open-instruct sets a method of the first, ms-swift imports the second."""
    engines = finder.FacadeModule("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    engines.TorchCheckpointEngine.load = lambda self, path: None
    assert not isinstance(nn.Linear(1, 1), engines.TorchCheckpointEngine)
    for module, name, instead in (
        ("runtime.checkpoint_engine", "TorchCheckpointEngine", "engine.save_checkpoint"),
        ("elasticity", "compute_elastic_config", "torchrun restarts jobs"),
        ("runtime.sequence_parallel.ulysses_sp", "TiledFusedLogitsLoss", "tiled_loss"),
        ("utils", "z3_leaf_parameter", "z3_leaf_module"),
    ):
        with pytest.raises(UsageError, match=f"{name}' is not provided by zero; .*{instead}"):
            getattr(finder.FacadeModule(f"deepspeed.{module}"), name)({})
