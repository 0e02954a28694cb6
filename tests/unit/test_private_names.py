"""Every private name of torch, transformers, accelerate and safetensors on which `zero/` leans.

`LEANED_ON` is the list. Its first column is the name as a Python expression, which this file
evaluates: a release that renames it fails here, under that name. The second is the file of tests
that fails if the name goes on to exist and means something else. A name that is used in `zero/` and
is not in the list fails too, as does one that is listed and no longer used.

`python -m benchmarks.versions` runs this file with older and newer releases."""

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.testing._internal.distributed.fake_pg
import transformers
from packaging.version import Version
from torch.optim import optimizer as optimizers

from tests.processes import REPOSITORY
from tests.releases import installed, needs

with contextlib.suppress(ImportError):  # in older releases
    import transformers.distributed.expert_parallel

LAYER = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(LAYER.parameters())
SCHEDULE = torch.optim.lr_scheduler.ConstantLR(OPTIMIZER)  # it wraps `step`
# What the expressions of the list begin with.
BEGINNINGS = {
    "torch": torch,
    "optimizers": optimizers,
    "transformers": transformers,
    "accelerate": accelerate,
    "ATEN": torch.ops.aten,
    "LAYER": LAYER,
    "OPTIMIZER": OPTIMIZER,
}
LEANED_ON = """
torch.nn.modules.batchnorm._BatchNorm              tests/parity/test_batch_slices.py
torch.nn.modules.module._global_forward_pre_hooks  tests/parity/test_batch_slices.py
torch.nn.modules.module._global_forward_hooks      tests/parity/test_batch_slices.py
torch.nn.modules.module._global_backward_pre_hooks tests/parity/test_batch_slices.py
torch.nn.modules.module._global_backward_hooks     tests/parity/test_batch_slices.py
torch.utils._pytree.tree_map_only                  tests/dist/core/test_engine.py
torch.utils._python_dispatch.is_traceable_wrapper_subclass tests/dist/core/test_engine.py
torch.utils._python_dispatch._disable_current_modes tests/dist/tools/test_estimate.py
torch._C._autograd._get_current_graph_task_keep_graph tests/parity/test_derivatives.py
torch._C._autograd._get_sequence_nr                tests/dist/core/test_gathering.py
LAYER.weight.sum().grad_fn._sequence_nr tests/dist/core/test_gathering.py
torch._C._current_autograd_node                    tests/hunt/test_hunt.py
torch._C._will_engine_execute_node                 tests/hunt/test_hunt.py
torch._C._functorch.peek_interpreter_stack         tests/parity/test_derivatives.py
torch._C._functorch.is_functorch_wrapped_tensor    tests/parity/test_derivatives.py
torch.autograd.forward_ad._current_level           tests/hunt/test_hunt.py
torch._C._DisableFuncTorch                         tests/parity/test_derivatives.py
torch.Tensor._make_subclass                        tests/dist/core/test_quantized_weights.py
torch.Tensor._make_wrapper_subclass                tests/parity/test_quantized.py
torch._C._disabled_torch_function_impl             tests/parity/test_quantized.py
torch._C._EnableTorchFunction                      tests/parity/test_quantized.py
torch._C._current_graph_task_id                    tests/dist/core/test_late_gradients.py
torch._C._profiler._ExperimentalConfig             tests/dist/tools/test_trace.py
torch._dynamo.config.recompile_limit               tests/parity/test_compile.py
torch._dynamo.config.nontraceable_tensor_subclasses tests/parity/test_compile.py
torch.autograd.Variable._execution_engine.queue_callback tests/dist/core/test_engine.py
torch.autograd.profiler._is_profiler_enabled       tests/dist/tools/test_trace.py
torch._has_compatible_shallow_copy_type            tests/dist/core/test_gathered_parameters.py
torch._foreach_norm                                tests/parity/test_fp32.py
torch._foreach_copy_                               tests/dist/core/test_reduction.py
torch._foreach_zero_                               tests/dist/core/test_reduction.py
torch._foreach_lerp                                tests/dist/optim/test_whole_tensor.py
torch._foreach_lerp_                               tests/dist/optim/test_whole_tensor.py
torch._foreach_mul_                                tests/dist/optim/test_whole_tensor.py
torch._foreach_add_                                tests/dist/optim/test_whole_tensor.py
optimizers._global_optimizer_pre_hooks             tests/unit/optim/test_adam_cpu_serves.py
optimizers._global_optimizer_post_hooks            tests/unit/optim/test_adam_cpu_serves.py
OPTIMIZER._optimizer_step_pre_hooks                tests/unit/optim/test_adam_cpu_serves.py
OPTIMIZER._optimizer_step_post_hooks               tests/unit/optim/test_adam_cpu_serves.py
OPTIMIZER.step._wrapped_by_lr_sched                tests/unit/optim/test_adam_cpu_serves.py
LAYER._parameters                                  tests/dist/checkpoint/test_export.py
LAYER._buffers                                     tests/dist/core/test_engine.py
LAYER._state_dict_hooks                            tests/dist/checkpoint/test_export.py
LAYER.weight._backward_hooks                       tests/accelerator/test_adapt.py
LAYER.weight._version                              tests/parity/test_forward_writes.py
LAYER.weight._use_count                            tests/dist/core/test_gathered_parameters.py
LAYER.weight._post_accumulate_grad_hooks           tests/dist/core/test_own_loops.py
LAYER.weight.untyped_storage()._cdata              tests/parity/test_offload.py
torch.distributed.tensor.DTensor._local_tensor     tests/parity/test_tensor_parallel.py
torch.distributed.ProcessGroup._device_types       tests/dist/comm/test_hybrid.py
torch.distributed.ProcessGroup._get_backend        tests/unit/comm/test_world.py
torch.distributed.ProcessGroupGloo._Options()._timeout tests/unit/comm/test_world.py
torch.distributed.distributed_c10d._world.pg_map   tests/accelerator/test_engine.py
torch.distributed.distributed_c10d._get_default_store tests/dist/comm/test_hybrid.py
torch.cuda.memory._record_memory_history           tests/dist/tools/test_trace.py
torch.cuda.memory._dump_snapshot                   tests/dist/tools/test_trace.py
optimizers._get_foreach_kernels_supported_devices  tests/dist/tools/test_estimate.py
torch.ops.aten._grouped_mm                         tests/dist/tools/test_estimate.py
torch.ops.aten._local_scalar_dense                 tests/dist/tools/test_estimate.py
torch.testing._internal.distributed.fake_pg.FakeStore tests/dist/tools/test_estimate.py
torch.ops.aten._to_copy                            tests/dist/tools/test_estimate.py
ATEN._scaled_dot_product_flash_attention_for_cpu   tests/dist/tools/test_estimate.py
ATEN._scaled_dot_product_flash_attention_for_cpu_backward tests/dist/tools/test_estimate.py
torch.ops.aten.add.Tensor._schema                  tests/dist/tools/test_estimate.py
transformers.LlamaConfig()._attn_implementation    tests/dist/parallel/test_sequence.py
transformers.LlamaForCausalLM._no_split_modules    tests/unit/core/test_layout.py
transformers.LlamaForCausalLM._tp_plan             tests/parity/test_pipeline.py
accelerate.PartialState._shared_state              tests/hf/test_scripts.py
"""
# Since later releases than the oldest ones that zero works with; the last one is gone again.
EXPERTS = "transformers.distributed.expert_parallel"
STAGE = "torch.distributed.pipelining.PipelineStage"
LATER = {
    "transformers.PreTrainedModel._expand_parallel_plan  tests/parity/test_tensor_parallel.py": (
        needs("transformers", "5.23", "it does not shard a model that exists by its plan")
    ),
    "transformers.utils.output_capturing._active_collector  tests/parity/test_batch_slices.py": (
        needs("transformers", "5.23", "it collects one tensor for each slice")
    ),
    f"{EXPERTS}.AllToAllEP._dispatch_tokens tests/unit/tools/test_estimate.py": (
        needs("transformers", "5.23", "it has no expert parallelism that zero uses")
    ),
    f"{STAGE}._get_init_p2p_neighbors_ops tests/parity/test_pipeline.py": pytest.mark.skipif(
        not Version("2.9") <= installed("torch") < Version("2.14"),
        reason="neighbours do not connect in this way before the first message",
    ),
}


def listed(text: str) -> list[tuple[str, str]]:
    rows = [line.split() for line in text.splitlines() if line]
    return [(name, test) for name, test in rows]


@pytest.mark.parametrize(("name", "test"), listed(LEANED_ON))
def test_a_name_is_there(name: str, test: str) -> None:
    eval(name, dict(BEGINNINGS))
    assert (REPOSITORY / test).exists()


@pytest.mark.parametrize("row", [pytest.param(row, marks=mark) for row, mark in LATER.items()])
def test_a_later_name_is_there(row: str) -> None:
    test_a_name_is_there(*row.split())


# Documented in spite of the underscore: Python's own, and torch's that end in one.
PUBLIC = {"_asdict", "_replace", "_exit", "_getframe", "_current_frames", "_fields"}
# `zero/integrations/deepspeed/engine.py` has the name in a variable.
INDIRECT = {"_post_accumulate_grad_hooks"}
# zero sets these, and transformers the last one, on modules that its plans have sharded.
MARKS = {"_opt_called", "_is_expert_parallel"}
# Attributes that objects get while a job runs: transformers' mark of a loaded tensor, PEFT's cache
# of a layer, TRL's list of names, and transformers' rules for old names. A change is noticed by
# tests/hf/test_scripts.py and tests/dist/checkpoint/test_streaming.py.
OF_RUNNING_JOBS = {"_is_hf_initialized", "_caches", "_weight_metadata", "_weight_conversions"}


def _private(name: object) -> bool:
    own = ("__", "_zero_", "_ds_")
    return isinstance(name, str) and name.startswith("_") and not name.startswith(own)


def _used(tree: ast.AST) -> Iterator[str]:
    """The names in attributes, imports from other packages, and calls of `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("zero"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            if isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, variables and attributes that the code makes itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "made"):
                yield node.attr


def test_the_list_is_what_the_code_uses() -> None:
    trees = [ast.parse(path.read_text()) for path in sorted(Path("zero").rglob("*.py"))]
    used = {name for tree in trees for name in _used(tree) if _private(name)}
    defined = {name for tree in trees for name in _defined(tree)}
    names = [name for name, _ in listed("\n".join([LEANED_ON, *LATER]))]
    known = {part for name in names for part in _used(ast.parse(name)) if _private(part)}
    last = {name.rpartition(".")[2] for name in names}
    assert used - defined - known - PUBLIC - MARKS - OF_RUNNING_JOBS == set()
    assert {name for name in last if _private(name)} - used - INDIRECT == set()
