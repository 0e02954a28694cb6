"""DeepSpeed's names beside the engine: estimates, groups, timers, defaults."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.dist.training import ds_config
from tests.processes import REPOSITORY, run, run_on
from zero import initialize
from zero.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from zero.config import load_config
from zero.errors import UsageError
from zero.integrations.deepspeed import (
    configuration,
    estimates,
    finder,
    fragments,
    timers,
    utilities,
)
from zero.integrations.deepspeed.checkpoints import (
    convert_to_universal,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_model_ckpt_name_for_rank,
)
from zero.optim.loss_scaler import LossScaler

WIDTH = 64


def state_bytes(rank: int, world_size: int, stage: int) -> tuple[int, int, int]:
    """Return the elements of the model and of its largest group, and the bytes of this rank's
    states after a step.
    """
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    )
    sizes = estimates._sizes(model)
    config = ds_config(bf16={"enabled": True}, stage3_param_persistence_threshold=0)
    config["zero_optimization"]["stage"] = stage
    engine = initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]
    engine.backward(engine(torch.randn(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    held = [
        tensor
        for shard in engine.optimizer.shards.values()
        for tensor in (shard.grad, shard.master)
    ]
    held += [
        param_group.full if param_group.persistent else param_group.shard
        for param_group in engine.groups
    ]
    held += [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.dim()
    ]
    return *sizes, sum(tensor.nbytes for tensor in held)


def test_estimates_are_what_the_engine_holds():
    for stage in (2, 3):
        total, largest, held = run_on(2, state_bytes, stage)[0]
        if stage == 2:
            _, device = estimates.estimate_zero2_model_states_mem_needs(total, 2, cpu_offload=False)
        else:
            needs = estimates.estimate_zero3_model_states_mem_needs(
                total, largest, 2, 1, False, False
            )
            device = needs[1] - needs[2]
        assert held == device, stage


def test_estimates_in_a_table(capsys):
    estimates.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(10**3, 10**3, bias=False), 2)
    rows = capsys.readouterr().out.splitlines()
    assert "1.0M parameters, 1.0M in the largest group" in rows[1] and len(rows) == 9
    # Host: 18 bytes a parameter and half of that as a reserve. Device: two copies of the group in
    # 16 bits.
    assert (
        rows[3].split()
        == "0.03GB | 0.00GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1".split()
    )
    estimates.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(10**3, 10**3, bias=False), 2)
    assert "offload_optimizer=none" in capsys.readouterr().out


def ranks_of_groups(rank: int, world_size: int) -> tuple:
    groups = finder.FacadeModule("deepspeed.utils.groups")
    with pytest.raises(KeyError):
        groups._get_sequence_parallel_group()
    return (
        groups._get_data_parallel_rank(),
        groups.get_data_parallel_world_size(),
        groups._get_model_parallel_world_size(),
    )


def test_every_rank_is_a_data_parallel_rank():
    assert run_on(2, ranks_of_groups) == [(0, 2, 1), (1, 2, 1)]


def test_samples_per_second(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr("zero.comm.clock.time.time", lambda: now[0])
    timer = timers.ThroughputTimer(
        SimpleNamespace(enabled=True), 6, 1, steps_per_output=3, logging_fn=said.append
    )
    assert timer.avg_samples_per_sec() == float("-inf")
    for step in range(3):
        for micro in range(2):
            timer.start()
            now[0] += 10 ** (1 - step)  # the first step, of 20 s, does not count
            timer.stop(global_step=micro == 1)
    assert timer.avg_samples_per_sec() == pytest.approx(2 * 6 / 2.2)
    assert said == ["step 3: 5.455 samples per second"]


def test_stopwatches(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("zero.integrations.deepspeed.timers.time.perf_counter", lambda: now[0])
    watches = timers.SynchronizedWallClockTimer()
    for seconds in (1, 3):
        watches("step").start()
        now[0] += seconds
        watches("step").stop()
    assert (
        watches.get_mean(["step", "other"]) == {"step": 2000} and watches("step").elapsed() == 4000
    )
    assert watches("step").elapsed() == 0
    timers.NoopTimer()("step").start()


def test_defaults_of_leaf_modules():
    leaves = configuration.DeepSpeedZeroConfig().leaf_module
    assert leaves.classes[0] == "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock"
    assert configuration.DeepSpeedZeroConfig(leaf_module={"names": "moe"}).leaf_module.names == [
        "moe"
    ]


def test_loss_scale_at_stage_0_halves_at_once_unless_a_hysteresis_is_given():
    fp16 = {"enabled": True, "initial_scale_power": 4}
    for given, expected in (({}, 8), ({"hysteresis": 2}, 16)):
        scaler = LossScaler.from_config(
            load_config({"train_batch_size": 1, "fp16": fp16 | given}).fp16
        )
        scaler.update(overflow=True)
        assert scaler.scale == expected


def set_by_hand(rank: int, world_size: int, stage: int) -> None:
    """Set `param.grad` in the script, on rank 0 three times as large.

    Also: the names of the loss scaler.
    """
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    config = ds_config(fp16={"enabled": True, "initial_scale_power": 3, "loss_scale_window": 1})
    config["zero_optimization"]["stage"] = stage
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, optimizer, _, _ = initialize(model=model, optimizer=optimizer, config=config)
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.scale_window, optimizer.dynamic_loss_scale) == (8, 1, True)
    engine.module.weight.grad = torch.full((1, 4), 24.0 if rank == 0 else 8.0, dtype=torch.float16)
    engine.step()
    assert engine.module.weight.grad is None and engine.get_global_grad_norm() == 4
    assert optimizer.fp32_partitioned_groups_flat[0].eq(-2).all()
    assert (optimizer.loss_scale_config.cur_iter, scaler.cur_scale) == (1, 8)
    with pytest.raises(AttributeError, match="fp16"):
        scaler.cur_scale = 2


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_set_by_hand_counts(stage):
    run_on(2, set_by_hand, stage)


def unnamed(rank: int, world_size: int, folder: str) -> None:
    engine = initialize(
        model=nn.Linear(2, 1), config=ds_config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )[0]
    for save_dir in ("", None):
        with pytest.raises(UsageError, match="save_dir"):
            engine.save_checkpoint(save_dir)
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
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            "weight": (1, 2),
            "bias": (1,),
        }
    assert get_model_ckpt_name_for_rank(tmp_path, "00") == str(
        tmp_path / "mp_rank_00_model_states.pt"
    )


def load_universal(rank: int, world_size: int, folder: str, weight: torch.Tensor) -> None:
    config = ds_config(optimizer={"type": "SGD", "params": {"lr": 0.1}}) | {
        "checkpoint": {"load_universal": True}
    }
    engine = initialize(model=nn.Linear(2, 1), config=config)[0]
    assert engine.load_checkpoint(folder, tag="universal")[0] == f"{folder}/universal"
    state = engine._zero3_consolidated_16bit_state_dict()
    assert rank or torch.equal(state["weight"], weight)


def test_a_checkpoint_converted_to_a_universal_one_loads_on_another_world_size(tmp_path):
    run_on(1, unnamed, str(tmp_path))
    args = SimpleNamespace(
        input_folder=str(tmp_path / "global_step1"), output_folder=str(tmp_path / "universal")
    )
    options = [
        "--input_folder",
        args.input_folder,
        "--output_folder",
        args.output_folder,
        "--num_merge_workers",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "zero",
        "run",
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        *options,
    ]
    done = run(command, timeout=100, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    weight = get_fp32_state_dict_from_zero_checkpoint(tmp_path)["weight"]
    run_on(2, load_universal, str(tmp_path), weight)
    args.input_folder = str(tmp_path / "none")
    with pytest.raises(ValueError, match="none"):
        convert_to_universal(args)


def with_an_unknown_state(rank: int, world_size: int) -> None:
    config = ds_config(optimizer={"type": "Adam", "params": {"lr": 0.1}})
    engine = initialize(model=nn.Linear(2, 2), config=config)[0]
    fragments.safe_set_full_optimizer_state(
        engine.module.weight, torch.ones(2, 2), "exp_avg"
    )  # no step yet: no state
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(UsageError, match="no state 'momentum'; it has exp_avg, exp_avg_sq"):
        fragments.safe_set_full_optimizer_state(engine.module.weight, torch.ones(2, 2), "momentum")
    with pytest.raises(UsageError, match="no backend 'inducter'"):
        engine.compile("inducter")


def test_an_unknown_optimizer_state_or_backend_is_refused():
    run_on(1, with_an_unknown_state)


def with_log_level(rank: int, world_size: int) -> None:
    logger = logging.getLogger("zero")
    engine = initialize(model=nn.Linear(2, 2), config=ds_config() | {"log_level": "error"})[0]
    assert engine.log_level() == configuration.get_log_level({"log_level": "Error"}) == "ERROR"
    assert logger.level == logging.ERROR
    utilities.set_log_level_from_string("info")
    assert logger.level == logging.INFO


def test_log_level_of_the_configuration_is_the_loggers():
    run_on(1, with_log_level)
    with pytest.raises(UsageError, match="log_level"):
        load_config({"log_level": "loud"})


def test_on_device_chooses_device_and_dtype_of_new_tensors():
    with utilities.OnDevice(torch.bfloat16):
        weight = nn.Linear(2, 2).weight
    assert weight.is_meta and weight.dtype == torch.bfloat16
    with utilities.OnDevice(torch.bfloat16, enabled=False):
        weight = nn.Linear(2, 2).weight
    assert not weight.is_meta and weight.dtype == torch.float32
