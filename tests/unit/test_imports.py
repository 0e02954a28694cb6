"""Imports inside of the repository point downwards only, and one module calls `torch.distributed`."""

import ast
from pathlib import Path

import pytest

import zero

PACKAGE = Path(zero.__file__).parent

# From the bottom to the top. A module may import those before it. A package's name stands for all
# of its modules.
LAYERS = [
    "zero.errors",
    "zero.comm.mesh",
    "zero.device",
    "zero.config",
    "zero.tools.arguments",
    "zero.core.layout",
    "zero.core.schedule",
    "zero.comm.clock",
    "zero.comm.watchdog",
    "zero.comm.fingerprint",
    "zero.comm.work",
    "zero.comm.gloo_interface",
    "zero.comm.world",
    "zero.comm.traffic",
    "zero.comm.communicator",
    "zero.parallel.sequence",
    "zero.comm.quantized",
    "zero.comm.consistency",
    "zero.offload",
    "zero.core.sharded_param",
    "zero.core.views",
    "zero.core.param_group",
    "zero.core.secondary_partition",
    "zero.core.optimizer_shard",
    "zero.core.activation_offload",
    "zero.core.gradients",
    "zero.core.gathering",
    "zero.core.reduction",
    "zero.core.external_access",
    "zero.core.hooks",
    "zero.optim",
    "zero.optim.param_access",
    "zero.core.gathered_parameters",
    "zero.parallel.experts",
    "zero.core.init",
    "zero.parallel.tensor",
    "zero.checkpoint",
    "zero.checkpoint.preemption",
    "zero.checkpoint.export",
    "zero.accumulation",
    "zero.build",
    "zero.engine",
    "zero.monitor",
    "zero.checkpoint.streaming",
    "zero.integrations.deepspeed",
    "zero.parallel.pipeline",
    "zero.tools.report",
    "zero.tools.profile",
    "zero.tools.verify",
    "zero",
    "zero.hf",
    "zero.tools.launch",
    "zero.tools.doctor",
    "zero.tools.estimate",
    "zero.tools.cli",
]
# Within a package.
INSIDE = {
    "zero.tools.estimate": [
        *(
            "question",
            "activation_trace",
            "states",
            "buffers",
            "messages",
            "gradients",
            "step",
            "updates",
            "traffic",
        ),
        *("rank", "remedies", "report"),
    ],
    "zero.config": [
        "keys",
        "reading",
        "optim",
        "offload",
        "parallel",
        "monitor",
        "precision",
        "sharding",
        "settings",
        "loading",
        "report",
        "explain",
        "__init__",
    ],
    "zero.offload": ["__init__", "memory", "files", "tiers"],
    "zero.checkpoint": [
        "values",
        "disk",
        "manifest",
        "folder",
        "model",
        "ranks",
        "files",
        "cuts",
        "resumable",
        "state",
        "background",
        "offline",
        "training",
        "__init__",
    ],  # fmt: skip
    "zero.parallel.sequence": ["group", "batches", "attention", "tiles", "__init__"],
    "zero.optim": [
        "loss_scaler",
        "moments",
        "cpu_adam",
        "tiles",
        "elementwise",
        "muon",
        "numbers",
        "ownership",
        "wrappers",
        "rounding",
        "exchange",
        "whole_tensor",
        "updates",
        "arithmetic",
        "placement",
        "step",
        "relocation",
    ],
    "zero.integrations.deepspeed": [
        "__init__",
        "labels",
        "leaf",
        "tiling",
        "fragments",
        "lr_schedules",
        "optimizers",
        "optimizer",
        "sequence",
        "tensor",
        "engine",
        "names",
        "accelerator",
        "configuration",
        "distributed",
        "checkpoints",
        "utilities",
        "estimates",
        "timers",
        "sequence_loader",
        "sequence_tiles",
        "finder",
    ],  # fmt: skip
    "zero.monitor": ["held", "facts", "writers", "mfu", "collectives", "monitor", "__init__"],
    "zero.tools.doctor": ["__init__", "checks", "links", "command"],
    "zero.tools.profile": [
        "__init__",
        "running",
        "brief",
        "spans",
        "trace",
        "memory",
        "picture",
        "command",
        "recorder",
    ],
    "zero.tools.report": ["__init__", "runs", "pictures", "page", "command"],
    "zero.tools.verify": ["__init__", "compare", "command", "plain", "record"],
    "zero.hf": ["resume", "hook", "preemption", "__init__", "startup.sitecustomize"],
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def rank(module: str) -> tuple[int, int]:
    """Return the position in `LAYERS`, then the position in that layer."""
    layer = next(
        (name for name in INSIDE if module == name or module.startswith(name + ".")), module
    )
    if layer not in LAYERS:
        raise AssertionError(f"{module} has no place in LAYERS")
    inside = INSIDE.get(layer)
    return LAYERS.index(layer), 0 if inside is None else inside.index(
        module.removeprefix(layer)[1:] or "__init__"
    )


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, also inside of functions and for type checkers only."""
    files = {dotted(each) for each in MODULES}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in files or whole == "torch.distributed" else node.module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_downwards(path):
    module = dotted(path)
    for imported in imports(path):
        if imported == "zero" or imported.startswith("zero."):
            assert rank(imported) < rank(module), (
                f"{module} imports {imported}, which is not below it"
            )


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_torch_distributed_has_one_door(path):
    of_dimensions = ("zero.parallel.sequence", "zero.parallel.tensor", "zero.parallel.pipeline")
    doors = (
        "zero.comm.communicator",
        "zero.comm.world",
        "zero.comm.gloo_interface",
        *of_dimensions,
        "zero.checkpoint",
        "zero.comm.watchdog",
    )
    if dotted(path).startswith(doors):
        return
    if dotted(path).startswith("zero.tools.doctor"):
        return  # it measures torch.distributed itself
    assert not [name for name in imports(path) if name.startswith("torch.distributed")]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        reached = isinstance(node, ast.Attribute) and node.attr == "distributed"
        assert not (reached and isinstance(node.value, ast.Name) and node.value.id == "torch"), (
            f"line {node.lineno}"
        )
