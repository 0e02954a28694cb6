"""DeepSpeed's `MonitorMaster`: a script's own numbers in the files of the configured monitors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero.comm import world
from zero.config import Config, load_config
from zero.config.load import Source
from zero.integrations.deepspeed import distributed
from zero.monitor.writers import EventWriter, writers

# Of a batch: with one of them, each that is missing follows from the others.
_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu"}


class DeepSpeedConfig:
    """A configuration, checked. Its keys are attributes: `monitor_config` is for `MonitorMaster`.

    `config` is a path or a dict; ValueError as by `initialize`. The other arguments have no
    effect."""

    def __init__(self, config: Source, mpu: object = None, mesh_device: object = None):
        settings = load_config(config, allow_auto=True)
        later = settings.origin.auto & {*_SIZES, "gradient_accumulation_steps"}
        if settings.origin.given & _SIZES and not later:
            settings = settings.resolve(distributed._get_data_parallel_world_size())
        self.settings = settings
        self.monitor_config = self.settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)


class MonitorMaster:
    """Writes events to the monitors that a configuration enables. Only rank 0 writes.

    `monitor_config`: that of a `DeepSpeedConfig`."""

    def __init__(self, monitor_config: Config):
        every = writers(monitor_config) if world.get_rank() == 0 else []
        self._writers = [writer for writer in every if isinstance(writer, EventWriter)]
        sections = (monitor_config.tensorboard, monitor_config.csv_monitor, monitor_config.wandb)
        self.enabled = any(section.enabled for section in sections)

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write (name, number, samples so far) of each event."""
        for name, number, samples in event_list:
            for writer in self._writers:
                writer.write_events([(name, float(number))], samples)
