"""Sections about what is measured and written while training."""

from zero.config.keys import Int, Names, Positive, Section, acts, unused


class _Measured(Section):
    """A section whose unknown keys change nothing that is computed."""

    lenient = True


class _Files(_Measured):
    """What sections that write to a folder have in common."""

    enabled: bool = acts(False, "Write the numbers of each step to files.")
    output_path: str = acts(
        "", "Folder for the files. Empty: the working directory.", needs="enabled"
    )
    job_name: str = acts(
        "DeepSpeedJobName", "Name of the folder in `output_path`.", needs="enabled"
    )


class TensorBoardConfig(_Files):
    """Each step's numbers for TensorBoard. It needs the package `tensorboard`."""


class CsvMonitorConfig(_Files):
    """Each step's numbers as CSV files, one for each quantity, with the columns `step` and the
    quantity's name.
    """


class JsonMonitorConfig(_Files):
    """Each step's numbers as one JSON object a line, in `steps.jsonl`.

    Not a section of DeepSpeed.
    """


class WandbConfig(_Measured):
    """Each step's numbers for Weights & Biases. It needs the package `wandb`."""

    enabled: bool = acts(False, "Send the numbers of each step.")
    group: str | None = acts(None, "Name of the group of runs.", needs="enabled")
    team: str | None = acts(None, "Name of the team (wandb's `entity`).", needs="enabled")
    project: str = acts("deepspeed", "Name of the project.", needs="enabled")


class CommsLoggerConfig(_Measured):
    """A table of the engine's collectives by kind and message size, from rank 0, by
    `deepspeed.comm.log_summary()` and at the end."""

    enabled: bool = acts(
        False, "Time the engine's collectives. On a GPU the host then waits for each of them."
    )
    verbose: bool = acts(False, "Print each collective when it ends.", needs="enabled")
    prof_all: bool = acts(
        True, "Time all collectives. false: those of `prof_ops`.", needs="enabled"
    )
    prof_ops: Names = acts([], "Kinds of collectives, such as `all_gather`.", needs="enabled")
    debug: bool = acts(False, "Rows for each group.", needs="enabled")


class FlopsProfilerConfig(_Measured):
    """Floating-point operations of one step, counted by `torch.utils.flop_counter` on rank 0."""

    enabled: bool = acts(
        False, "Count the operations of step `profile_step`, and print a table by module."
    )
    profile_step: Positive = acts(1, "The optimizer step that is counted.", needs="enabled")
    module_depth: Int = acts(-1, "Depth of the modules in the table. -1: all.", needs="enabled")
    output_file: str | None = acts(None, "File for the table. Default: stderr.", needs="enabled")
    recompute_fwd_factor: float = unused(
        0.0, "operations are counted as they run, recomputation included"
    )
    top_modules: Int = unused(1, "the table has all modules down to module_depth")
    detailed: bool = unused(True, "the table has all modules down to module_depth")
