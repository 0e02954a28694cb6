"""First-party imports point downwards only, and `torch.distributed` has one door."""

import ast
from pathlib import Path

import pytest

import zero

PACKAGE = Path(zero.__file__).parent

# From the bottom to the top. A module may import those before it, a package's name standing for all in it.
LAYERS = [
    "zero.errors",
    "zero.device",
    "zero.config",
    "zero.layout",
    "zero.schedule",
    "zero.clock",
    "zero.watchdog",
    "zero.order",
    "zero.pending",
    "zero.world",
    "zero.comm",
    "zero.compression",
    "zero.agreement",
    "zero.offload",
    "zero.parameters",
    "zero.views",
    "zero.unit",
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
    "zero.checkpoint",
    "zero.preemption",
    "zero.export",
    "zero.accumulation",
    "zero.construction",
    "zero.engine",
    "zero.streaming",
    "zero.deepspeed",
    "zero",
    "zero.hf",
    "zero.activation_trace",
    "zero.estimate",
    "zero.__main__",
]
# Within a package.
INSIDE = {
    "zero.config": ["keys", "reading", "optim", "offload", "settings", "loading", "report", "explain", "__init__"],
    "zero.offload": ["__init__", "memory", "files", "tiers"],
    "zero.checkpoint": [
        "values",
        "disk",
        "manifest",
        "folder",
        "model",
        "ranks",
        "files",
        "resumable",
        "state",
        "background",
        "offline",
        "training",
        "__init__",
    ],  # fmt: skip
    "zero.optim": [
        "loss_scaler",
        "cpu_adam",
        "tiles",
        "elementwise",
        "muon",
        "ownership",
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
        "engine",
        "names",
        "accelerator",
        "configuration",
        "distributed",
        "checkpoints",
        "utilities",
        "estimates",
        "timers",
        "finder",
    ],  # fmt: skip
    "zero.hf": ["resume", "hook", "preemption", "__init__", "startup.sitecustomize"],
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def rank(module: str) -> tuple[int, int]:
    """Position in `LAYERS`, then in the layer."""
    layer = next((name for name in INSIDE if module == name or module.startswith(name + ".")), module)
    if layer not in LAYERS:
        raise AssertionError(f"{module} has no place in LAYERS")
    inside = INSIDE.get(layer)
    return LAYERS.index(layer), 0 if inside is None else inside.index(module.removeprefix(layer)[1:] or "__init__")


def imports(path: Path) -> set[str]:
    """Every module that the file imports, for a type checker too, at any depth; `from zero import comm` is zero.comm"""
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
    if dotted(path).startswith(("zero.comm", "zero.world", "zero.checkpoint", "zero.watchdog")):
        return
    assert not [name for name in imports(path) if name.startswith("torch.distributed")]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        reached = isinstance(node, ast.Attribute) and node.attr == "distributed"
        assert not (reached and isinstance(node.value, ast.Name) and node.value.id == "torch"), f"line {node.lineno}"
