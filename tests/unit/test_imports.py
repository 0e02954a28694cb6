"""Imports inside of the repository point downwards only, and one module calls `torch.distributed`."""

import ast
from pathlib import Path

import pytest

import zero

PACKAGE = Path(zero.__file__).parent

# From the bottom to the top. A module may import those before it. A package's name stands for all of its modules.
LAYERS = [
    "zero.errors",
    "zero.mesh",
    "zero.device",
    "zero.config",
    "zero.arguments",
    "zero.layout",
    "zero.schedule",
    "zero.clock",
    "zero.watchdog",
    "zero.order",
    "zero.pending",
    "zero.interface",
    "zero.world",
    "zero.links",
    "zero.comm",
    "zero.sequence",
    "zero.compression",
    "zero.agreement",
    "zero.offload",
    "zero.parameters",
    "zero.views",
    "zero.unit",
    "zero.second_shards",
    "zero.optimizer_shard",
    "zero.activations",
    "zero.gradients",
    "zero.gathering",
    "zero.reduction",
    "zero.reads",
    "zero.hooks",
    "zero.optim",
    "zero.parameter_state",
    "zero.gathered",
    "zero.experts",
    "zero.init",
    "zero.tensor_parallel",
    "zero.checkpoint",
    "zero.preemption",
    "zero.export",
    "zero.accumulation",
    "zero.construction",
    "zero.engine",
    "zero.monitor",
    "zero.streaming",
    "zero.deepspeed",
    "zero.pipeline",
    "zero.report",
    "zero.watch",
    "zero.verify",
    "zero",
    "zero.hf",
    "zero.launch",
    "zero.doctor",
    "zero.estimate",
    "zero.__main__",
]
# Within a package.
INSIDE = {
    "zero.estimate": [
        *("question", "activation_trace", "states", "buffers", "messages", "gradients", "step", "updates", "traffic"),
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
    "zero.sequence": ["group", "batches", "attention", "tiles", "__init__"],
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
    "zero.deepspeed": [
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
    "zero.doctor": ["__init__", "checks", "links", "command"],
    "zero.watch": ["__init__", "running", "brief", "spans", "trace", "memory", "picture", "command", "recorder"],
    "zero.report": ["__init__", "runs", "pictures", "page", "command"],
    "zero.verify": ["__init__", "compare", "command", "plain", "record"],
    "zero.hf": ["resume", "hook", "preemption", "__init__", "startup.sitecustomize"],
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def rank(module: str) -> tuple[int, int]:
    """Return the position in `LAYERS`, then the position in that layer."""
    layer = next((name for name in INSIDE if module == name or module.startswith(name + ".")), module)
    if layer not in LAYERS:
        raise AssertionError(f"{module} has no place in LAYERS")
    inside = INSIDE.get(layer)
    return LAYERS.index(layer), 0 if inside is None else inside.index(module.removeprefix(layer)[1:] or "__init__")


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
            assert rank(imported) < rank(module), f"{module} imports {imported}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_torch_distributed_has_one_door(path):
    of_dimensions = ("zero.sequence", "zero.tensor_parallel", "zero.pipeline")
    doors = ("zero.comm", "zero.world", "zero.interface", *of_dimensions, "zero.checkpoint", "zero.watchdog")
    if dotted(path).startswith(doors):
        return
    if dotted(path).startswith("zero.doctor"):
        return  # it measures torch.distributed itself
    assert not [name for name in imports(path) if name.startswith("torch.distributed")]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        reached = isinstance(node, ast.Attribute) and node.attr == "distributed"
        assert not (reached and isinstance(node.value, ast.Name) and node.value.id == "torch"), f"line {node.lineno}"
