"""DeepSpeed's names that scripts use: the engine's methods, its optimizer, and what lies beside
them.
"""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from tests.unit.integrations.test_names import METHODS, names_of
from zero import fragments, initialize
from zero.errors import UsageError
from zero.integrations.deepspeed import leaf
from zero.integrations.deepspeed.checkpoints import convert_zero_checkpoint_to_fp32_state_dict
from zero.integrations.deepspeed.finder import FacadeModule

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def ranks_of_groups(rank: int, world_size: int) -> None:
    groups = FacadeModule("deepspeed.utils.groups")
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
        ("zenflow_config", "overlap_step"),
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


def engines_share_a_loss(rank: int, world_size: int) -> None:
    engines = [make(gradient_accumulation_steps=1)[0] for _ in range(2)]
    torch.stack([engine(torch.ones(2, 4)).sum() for engine in engines]).sum().backward()
    for engine in engines:
        engine._backward_epilogue()
        engine.step()
    assert [engine.global_steps for engine in engines] == [1, 1]


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
    engine.allreduce_gradients()
    with pytest.raises(AssertionError, match="Give initialize all groups"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    "check",
    [
        settings_are_methods,
        methods_work_or_say_what_to_use,
        gradients_by_parameter,
        the_batch_changes_between_steps,
        engines_share_a_loss,
        *(partial(weights_are_loaded_into_an_engine, stage=stage) for stage in (0, 2, 3)),
        what_scripts_read_of_the_optimizer,
        with_an_unknown_state,
        attributes,
        *(partial(with_hooks, stage=stage) for stage in (0, 3)),
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
    schedules = FacadeModule("deepspeed.runtime.lr_schedules")
    assert (schedules.WARMUP_LR, schedules.WARMUP_NUM_STEPS) == ("WarmupLR", "warmup_num_steps")
    facade = FacadeModule("deepspeed")
    assert issubclass(facade.DeepSpeedConfigError, ValueError) and facade.__git_hash__
    assert FacadeModule("deepspeed.runtime.config").ADAMW_OPTIMIZER == "adamw"
    assert FacadeModule("deepspeed.zero").MiCS_Init is zero.Init
    sections = FacadeModule("deepspeed.runtime.zero.config")
    made = sections.DeepSpeedZeroConfig(stage=2, offload_optimizer={})
    assert isinstance(made.offload_optimizer, sections.DeepSpeedZeroOffloadOptimizerConfig)
    with pytest.raises(facade.DeepSpeedConfigError):
        facade.DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})
    assert facade.DeepSpeedConfig({"train_batch_size": 3}).train_micro_batch_size_per_gpu == 3
    assert facade.DeepSpeedConfig({}).train_batch_size is None
    builders = FacadeModule("deepspeed.ops.op_builder")
    assert FacadeModule("deepspeed.ops").__compatible_ops__[builders.FusedLambBuilder.NAME]
    builders.CPUAdamBuilder().load()


def test_names_that_are_imported_and_not_used_are_errors_when_they_are_called():
    """open-instruct sets a method of the first, ms-swift imports the second."""
    engines = FacadeModule("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")
    engines.TorchCheckpointEngine.load = lambda self, path: None
    assert not isinstance(nn.Linear(1, 1), engines.TorchCheckpointEngine)
    for module, name, instead in (
        ("runtime.checkpoint_engine", "TorchCheckpointEngine", "engine.save_checkpoint"),
        ("elasticity", "compute_elastic_config", "torchrun restarts jobs"),
        ("runtime.sequence_parallel.ulysses_sp", "TiledFusedLogitsLoss", "tiled_loss"),
        ("utils", "z3_leaf_parameter", "z3_leaf_module"),
    ):
        with pytest.raises(UsageError, match=f"{name}' is not provided by zero; .*{instead}"):
            getattr(FacadeModule(f"deepspeed.{module}"), name)({})


# -- beside the engine

PROFILER = FacadeModule("deepspeed.profiling.flops_profiler")
UTILS = FacadeModule("deepspeed.runtime.utils")
# 2 for each weight and row
OPERATIONS = 2 * 3 * (8 * 16 + 16 * 4)


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_get_model_profile_counts_products(capsys):
    found = PROFILER.get_model_profile(model(), (3, 8), as_string=False)
    assert found == (OPERATIONS, OPERATIONS // 2, 8 * 16 + 16 + 16 * 4 + 4)
    assert "Sequential.2" in capsys.readouterr().out
    asked = {"args": [torch.ones(3, 8)], "print_profile": False}
    assert PROFILER.get_model_profile(model(), **asked) == ("1.15 K", "576.00 MACs", "212.00")
    with pytest.raises(UsageError, match="input_shape, args or kwargs"):
        PROFILER.get_model_profile(model())


def test_flops_profiler_counts_from_start_to_stop(tmp_path):
    net = model()
    profiler = PROFILER.FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(3, 8))
    profiler.stop_profile()
    net(torch.ones(3, 8))
    assert profiler.get_total_flops() == OPERATIONS and profiler.get_total_duration() > 0
    assert profiler.get_total_macs(as_string=True) == "576.00 MACs"
    profiler.print_model_profile(profile_step=5, output_file=str(tmp_path / "profile"))
    assert "at step 5: 1.15 KFLOPS" in (tmp_path / "profile").read_text()
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_monitor_master_writes_a_scripts_events(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = {"train_batch_size": "auto", "csv_monitor": section}
    settings = FacadeModule("deepspeed.runtime.config").DeepSpeedConfig(config)
    assert settings.gradient_clipping == 1.0
    master = FacadeModule("deepspeed.monitor.monitor").MonitorMaster(settings.monitor_config)
    assert master.enabled
    master.write_events([("Train/Samples/my_loss", 0.5, 8), ("Train/Samples/my_loss", 0.25, 16)])
    written = (tmp_path / "job" / "Train_Samples_my_loss.csv").read_text()
    assert written.split() == ["step,my_loss", "8,0.5", "16,0.25"]


def test_clip_grad_norm():
    # the mean of both ranks' norms, of gradients (3, 4) and (6, 8)
    assert run_on(2, clip) == [pytest.approx(7.5)] * 2


def clip(rank, world_size):
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for param, value in zip(params, (3.0, 4.0), strict=False):
        param.grad = torch.tensor([value * (1 + rank)])
    norm = UTILS.clip_grad_norm_(params, 0.75)
    assert params[1].grad.item() == pytest.approx(4.0 * (1 + rank) / 10)
    engine, *_ = zero.initialize(model=model(), config=ds_config(optimizer={"type": "AdamW"}))
    owned = list(engine.parameters())
    with pytest.raises(UsageError, match="set gradient_clipping in the configuration"):
        UTILS.clip_grad_norm_(owned, 1.0)
    with pytest.raises(UsageError, match=r"read engine\.optimizer\.overflow"):
        UTILS.CheckOverflow([owned])
    return norm.item()


def test_small_names(caplog):
    utils = FacadeModule("deepspeed.utils")
    batches = iter(utils.RepeatingLoader([1, 2]))
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    UTILS.set_random_seed(3)
    first = torch.rand(1)
    UTILS.set_random_seed(3)
    assert torch.equal(first, torch.rand(1))
    with caplog.at_level("INFO", logger="zero"):
        utils.log_dist("said", ranks=[0])
        utils.log_dist("not said", ranks=[1])
        UTILS.see_memory_usage("after", force=True)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "[rank 0] said" and messages[1].startswith("after: ")
    assert len(messages) == 2
    weight = torch.ones(2, requires_grad=True)
    FacadeModule("deepspeed.checkpointing").checkpoint(torch.sin, weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2).cos())


def test_the_accelerator_has_torchs_functions():
    device = FacadeModule("deepspeed").get_accelerator()
    assert device.total_memory() > device.memory_allocated() > 0
    device.empty_cache()
    device.synchronize()
    assert device.communication_backend_name() == "gloo" and device.device_count() == 1
    asked = "is_synchronized_device use_host_timers resolves_data_dependency is_available"
    assert all(getattr(device, name)() for name in asked.split())
    weight, state = device.FloatTensor([1.0]), device.get_rng_state()
    assert device.on_accelerator(device.pin_memory(weight))
    drawn = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(AttributeError, match="get_accelerator\\(\\).nonsense is not provided"):
        _ = device.nonsense
