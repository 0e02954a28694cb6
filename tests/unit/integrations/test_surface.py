"""Names of DeepSpeed that published scripts use, in one process."""

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import run_on
from zero.errors import UsageError
from zero.integrations.deepspeed.finder import FacadeModule

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
