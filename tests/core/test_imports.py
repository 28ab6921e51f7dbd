"""What importing qflash brings along, and which part of the package may import which."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import pathlib
import sys

import pytest

import qflash
import qflash_lab
from helpers import run_compiling

ROOT = pathlib.Path(qflash.__file__).parent
LAB = pathlib.Path(qflash_lab.__file__).parent
WINGS = ("specification", "integrations", "kernels", "network")
COMMANDS = ("__main__", "cli", "commands", "info")
"""Modules beside the core that only the command imports; they may import anything."""
NOT_AT_FIRST = {"kernels", *COMMANDS, "paths", "versions"}
ALLOWED = {
    "specification": set(),
    # inside functions, where a back end is chosen
    "core": {"specification", "kernels", "integrations", "network"},
    "kernels": {"specification", "core"},
    "integrations": {"specification", "core", "kernels"},
    "network": {"specification", "core", "integrations", "kernels"},
}
EXCEPTIONS = {
    # what torch.func does to a tensor shows in PyTorch alone
    ("specification.quantization", "torch_internals"),
    # ranges of activations are found alike in patched models and in networks
    ("integrations.calibrate", "network.calibration"),
    ("integrations.calibrate", "network.conversion"),
}
"""Modules that import another one against :data:`ALLOWED`."""
ALLOWED_IN_LAB: dict[str, set[str]] = {
    "": {"bench", "evaluation", "verify", "paper"},
    "baselines": set(),
    "evaluation": {"baselines"},
    "verify": set(),
    "paper": {"", "baselines", "bench", "evaluation"},
    # the paper's printed results stand beside measured ones
    "bench": {"baselines", "evaluation", "paper"},
}
"""Which folders of the lab may import which others; ``""`` is what lies beside them."""


def print_loaded(statements: str) -> list[str]:
    """Return the modules that a fresh process has loaded after some statements, but for those of PyTorch itself."""
    text = f"import sys, json, torch; before = set(sys.modules); {statements}; print(json.dumps([*set(sys.modules) - before]))"
    done = run_compiling("-c", text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_qflash_loads_the_core_alone() -> None:
    loaded = print_loaded("import qflash")
    others = {name.split(".")[0] for name in loaded} - {"qflash"} - set(sys.stdlib_module_names)
    assert others <= {"torch"}
    wings = {name.split(".")[1] for name in loaded if name.startswith("qflash.")}
    assert wings.isdisjoint(NOT_AT_FIRST), sorted(wings)


def test_noting_launches_does_not_load_dynamo() -> None:
    statements = "from qflash.kernels.launch_recorder import LaunchRecorder as R; r = R(); r.__enter__(); torch.empty(3)"
    loaded = print_loaded(f"{statements}; assert r.is_pure; torch.ones(3); assert not r.is_pure; r.__exit__(None, None, None)")
    assert "qflash.kernels.launch_recorder" in loaded
    assert "torch._dynamo" not in loaded


@pytest.mark.parametrize("first", ["qflash", "torch.utils.flop_counter"])
@pytest.mark.slow
def test_operations_are_counted_whatever_was_imported_first(first: str) -> None:
    text = f"""
import {first}, torch, qflash
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 2, 8, 16)
with FlopCounterMode(display=False) as counter:
    qflash.attention(x, x, x, backend="reference")
print(counter.get_total_flops())
"""
    done = run_compiling("-c", text)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 2 * 8 * 8 * (16 + 16)


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: pathlib.Path, root: pathlib.Path = ROOT) -> list[tuple[str, bool]]:
    """Return the modules of its own package that a file imports, as dotted names, and whether at its top level."""
    package = path.relative_to(root).parent.parts
    tree = parsed(path)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            for alias in node.names:
                full = (*base, *(node.module.split(".") if node.module else ()), alias.name)
                found.append((".".join(full), node in tree.body))
    return found


def wing(name: str) -> str:
    head = name.split(".")[0]
    return head if head in WINGS else "command" if head in COMMANDS else "core"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_directions_of_imports(path: pathlib.Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
    here = wing(name)
    if here == "command":
        return
    for imported, at_top in imports(path):
        there = wing(imported)
        module = imported.rpartition(".")[0]
        assert there == here or there in ALLOWED[here] or (name, module) in EXCEPTIONS, (name, imported)
        # the core reaches kernels only where a back end runs, and integrations only for their public names
        if here == "core" and there == "kernels":
            assert not at_top, (name, imported)
        if there == "kernels" and imported.startswith("kernels.gluon.") and not name.startswith("kernels.gluon."):
            # Triton's interpreter has no Gluon
            assert {"launch", "rules"} & {*imported.split(".")[3:]}, (name, imported)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_package_does_not_import_the_lab(path: pathlib.Path) -> None:
    for node in ast.walk(parsed(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] == "qflash_lab"]


@pytest.mark.parametrize("path", sorted(LAB.rglob("*.py")), ids=lambda path: path.relative_to(LAB).as_posix())
def test_directions_of_imports_in_the_lab(path: pathlib.Path) -> None:
    here = path.relative_to(LAB).parts[0].removesuffix(path.name)
    if path.name in ("cli.py", "__main__.py"):
        return
    for imported, _ in imports(path, LAB):
        head = imported.split(".")[0]
        there = head if head in ALLOWED_IN_LAB else ""
        assert there == here or there in ALLOWED_IN_LAB[here], (path, imported)


BACK = {
    # methods of IntegerNetwork, which these modules take
    ("network.graph", "network.c_export"),
    ("network.graph", "network.web_export"),
    ("network.graph", "network.float_parts"),
    ("network.graph", "network.onnx_export"),
    ("network.graph", "network.storage"),
    ("network.graph", "network.tosa_export"),
    # comparing reads a model as quantising does, and quantising compares at its end
    ("network.compare", "network.quantize"),
}
"""Imports inside functions that close a circle: (from, to)."""


def test_no_module_imports_itself_in_a_circle() -> None:
    """Neither at the top level nor inside functions, but for :data:`BACK`."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")
    }
    graph = {
        name: {other if other in modules else other.rpartition(".")[0] for other, _ in imports(path)} - {name, ""}
        for name, path in modules.items()
    }
    for name, other in BACK:
        graph[name].remove(other)
    graphlib.TopologicalSorter(graph).prepare()
    for name, other in BACK:
        with pytest.raises(graphlib.CycleError):
            graphlib.TopologicalSorter({**graph, name: {*graph[name], other}}).prepare()
