"""DeepSpeed's flops profiler. torch's `FlopCounterMode` counts.

It counts products of matrices, convolutions and attention, two operations for a multiplication with
an addition. DeepSpeed counts activations and norms too, so its numbers are a little larger. What
runs backward while a profile is open counts as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero.config.monitor import FlopsProfilerConfig
from zero.errors import UsageError


def _shown(number: float, unit: str, as_string: bool) -> Any:
    """The number, or a text such as "1.25 G" and the unit."""
    if not as_string:
        return number
    size, prefix = next(
        (each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")) if number >= each[0]),
        (1, ""),
    )
    return f"{number / size:.2f} {prefix}{unit}".rstrip()


class FlopsProfiler(FlopCounterMode):
    """Counts the operations of `model` between `start_profile` and `stop_profile`.

    `ds_engine` and `recompute_fwd_factor` have no effect."""

    def __init__(
        self, model: nn.Module, ds_engine: object = None, recompute_fwd_factor: float = 0.0
    ):
        super().__init__(display=False, depth=999)
        self.model = model
        self.started = False
        self.seconds = 0.0

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self.flop_counts.clear()
        self.seconds = 0.0

    def start_profile(self, ignore_list: list | None = None) -> None:
        """Count from now on."""
        if ignore_list:
            raise UsageError("flops profiler: modules cannot be left out; pass none to ignore")
        self.__enter__()
        self._start = time.perf_counter()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting."""
        if self.started:
            self.started = False
            self.seconds = time.perf_counter() - self._start
            self.__exit__(None, None, None)

    def end_profile(self) -> None:
        """Stop counting, and forget what was counted."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations."""
        return _shown(super().get_total_flops(), "FLOPS", as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiplications with an addition: half as many."""
        return _shown(super().get_total_flops() // 2, "MACs", as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds from `start_profile` to `stop_profile`."""
        return _shown(self.seconds, "s", as_string)

    def get_total_params(self, as_string: bool = False) -> Any:
        """The model's parameters, whole ones if they are sharded."""
        return _shown(sum(param.numel() for param in self.model.parameters()), "", as_string)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, and with `detailed` a table of the modules down to `module_depth`.

        `top_modules` has no effect."""
        flops, seconds = self.get_total_flops(), self.seconds
        text = (
            f"floating-point operations at step {profile_step}: {self.get_total_flops(True)} in "
            f"{seconds:.3g} s, {flops / seconds / 1e12:.4g} TFLOP/s; "
            f"multiplications with an addition: {self.get_total_macs(True)}; "
            f"parameters: {self.get_total_params(True)}\n"
        )
        if detailed:
            text += self.get_table(module_depth if module_depth > 0 else 999) + "\n"
        if output_file is None:
            print(text, end="", flush=True)
        else:
            Path(output_file).write_text(text, encoding="utf-8")


def profile_of_step(section: FlopsProfilerConfig, model: nn.Module) -> Callable[[int], None]:
    """A function to be called after each step with its number. It counts and prints the operations
    of the step that the section `flops_profiler` names.

    Raises UsageError if the folder of its file is missing.
    """
    file, depth = section.output_file, section.module_depth
    if file is not None and not Path(file).resolve().parent.is_dir():
        raise UsageError(f"flops_profiler.output_file: {file}: there is no such folder")
    profiler = FlopsProfiler(model)
    # The engine and its `module` are two levels of their own.
    depth = depth + 2 if depth > 0 else -1

    def between_steps(number: int) -> None:
        if profiler.started:
            profiler.stop_profile()
            profiler.print_model_profile(number, depth, output_file=file)
        if number + 1 == section.profile_step:
            profiler.start_profile()

    between_steps(0)
    return between_steps


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: Any = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: list | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiplications with an addition, and parameters of one forward, or of one
    `generate` (`mode`).

    Args:
        input_shape: of one tensor of the parameters' dtype, instead of `args`.
        warm_up: how often to run before.

    The model is in evaluation mode afterwards. Raises UsageError without inputs.
    """
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    if input_shape is not None:
        param = next(model.parameters(), torch.empty(0))
        args = (torch.ones(input_shape, dtype=param.dtype, device=param.device),)
    if not args and not kwargs:
        raise UsageError("get_model_profile: give input_shape, args or kwargs")
    call: Any = model.generate if mode == "generate" else model
    model.eval()
    for _ in range(warm_up):
        call(*args, **kwargs)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **kwargs)
    finally:
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    flops = profiler.get_total_flops()
    return (
        _shown(flops, "", as_string),
        _shown(flops // 2, "MACs", as_string),
        profiler.get_total_params(as_string),
    )
