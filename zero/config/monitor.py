"""Sections about what is measured and written while training."""

from zero.config.idle import with_idle_keys
from zero.config.keys import Int, Names, Positive, Section, key


class Measured(Section):
    """A section whose unknown keys change nothing that is computed."""

    lenient = True


class FilesConfig(Measured):
    """What sections that write to a folder have in common.

    Attributes:
        enabled: Write the metrics of each step to files.
        output_path: Folder for the files. Empty: the working directory.
        job_name: Name of the subfolder of `output_path`.
    """

    enabled: bool = False
    output_path: str = key("", needs="enabled")
    job_name: str = key("DeepSpeedJobName", needs="enabled")


class TensorBoardConfig(FilesConfig):
    """The metrics of each step for TensorBoard. Needs the package `tensorboard`."""


class CsvMonitorConfig(FilesConfig):
    """The metrics of each step as CSV files, one for each metric, with the columns `step` and the
    metric's name.
    """


class JsonMonitorConfig(FilesConfig):
    """The metrics of each step as one JSON object per line, in `steps.jsonl`.

    Not in DeepSpeed.
    """


class WandbConfig(Measured):
    """The metrics of each step for Weights & Biases. Needs the package `wandb`.

    Attributes:
        enabled: Send the metrics of each step.
        group: Name of the group of runs.
        team: Name of the team (wandb's `entity`).
        project: Name of the project.
    """

    enabled: bool = False
    group: str | None = key(None, needs="enabled")
    team: str | None = key(None, needs="enabled")
    project: str = key("deepspeed", needs="enabled")


class CommsLoggerConfig(Measured):
    """A table of the engine's collectives by kind and message size. Rank 0 prints it at the end,
    and when `deepspeed.comm.log_summary()` is called.

    Attributes:
        enabled: Time the engine's collectives. On a GPU the host then waits for each of them.
        verbose: Print each collective when it ends.
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
    """Floating-point operations of one step, counted by `torch.utils.flop_counter` on rank 0.

    Attributes:
        enabled: Count the operations of step `profile_step`, and print a table by module.
        profile_step: The optimizer step that is counted.
        module_depth: Depth of the modules in the table. -1: all.
        output_file: File for the table. Default: stderr.
    """

    enabled: bool = False
    profile_step: Positive = key(1, needs="enabled")
    module_depth: Int = key(-1, needs="enabled")
    output_file: str | None = key(None, needs="enabled")
