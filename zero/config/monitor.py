"""The sections about measurements during training."""

from zero.config.idle import with_idle_keys
from zero.config.keys import Int, Names, Positive, Section, key


class Measured(Section):
    """A section whose unknown keys do not change what is computed."""

    lenient = True


class FilesConfig(Measured):
    """What sections that write to a folder have in common.

    Attributes:
        enabled: Write the metrics of each step.
        output_path: The folder. Default: the working directory.
        job_name: Its subfolder for this run.
    """

    enabled: bool = False
    output_path: str = key("", needs="enabled")
    job_name: str = key("DeepSpeedJobName", needs="enabled")


class TensorBoardConfig(FilesConfig):
    """Writes the metrics of each step for TensorBoard. Needs the package `tensorboard`."""


class CsvMonitorConfig(FilesConfig):
    """Writes the metrics of each step to CSV files: one file per metric, with the columns `step`
    and the metric's name.
    """


class JsonMonitorConfig(FilesConfig):
    """Writes the metrics of each step to `steps.jsonl`, one JSON object per line.

    Not in DeepSpeed.
    """


class WandbConfig(Measured):
    """Sends the metrics of each step to Weights & Biases. Needs the package `wandb`.

    Attributes:
        enabled: Send the metrics of each step.
        group: The group of runs.
        team: The team (wandb's `entity`).
        project: The project.
    """

    enabled: bool = False
    group: str | None = key(None, needs="enabled")
    team: str | None = key(None, needs="enabled")
    project: str = key("deepspeed", needs="enabled")


class CommsLoggerConfig(Measured):
    """Times the engine's collectives. Rank 0 prints a table by kind and message size at the end of
    the process, and whenever `deepspeed.comm.log_summary()` is called.

    Attributes:
        enabled: Time the engine's collectives. On a GPU the host then waits for each of them.
        verbose: Print a line for each collective.
        prof_all: Time all collectives. `false`: only those in `prof_ops`.
        prof_ops: Kinds of collectives, such as `all_gather`.
        debug: Add rows for each parameter group.
    """

    enabled: bool = False
    verbose: bool = key(False, needs="enabled")
    prof_all: bool = key(True, needs="enabled")
    prof_ops: Names = key([], needs="enabled")
    debug: bool = key(False, needs="enabled")


@with_idle_keys("flops_profiler")
class FlopsProfilerConfig(Measured):
    """Counts the floating-point operations of one step on rank 0, by `torch.utils.flop_counter`.

    Attributes:
        enabled: Count the operations of one step, by module.
        profile_step: The optimizer step to count.
        module_depth: How deep the table goes. -1: all modules.
        output_file: The file for the table. Default: stdout.
    """

    enabled: bool = False
    profile_step: Positive = key(1, needs="enabled")
    module_depth: Int = key(-1, needs="enabled")
    output_file: str | None = key(None, needs="enabled")
