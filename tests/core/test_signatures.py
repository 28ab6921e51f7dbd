"""Functions have few parameters: those on the host, and kernels."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

import qflash

ROOT = pathlib.Path(qflash.__file__).parent
MOST = 8
PUBLIC = {name for name in qflash.__all__ if name.islower()}
MORE = {
    # a command has its options
    "cli.py": {"convert"},
    # operators of torch.ops.qflash have the parameters of their schemas
    "execution.py": {"int8_attention"},
    "varlen.py": {"varlen_attention"},
    "network/operators/gated.py": {"int8_linear_gated"},
    "network/operators/norms.py": {"integer_norm", "_check"},
    # the constants of a normalisation, tokens that it takes, what it adds to, and whether the mean stays
    "specification/layers.py": {"layer_norm"},
    "reference_backend.py": {"layer_norm"},
    "kernels/cpu/backend.py": {"layer_norm"},
    "network/float_parts.py": {"__init__"},
    # sizes of attention, and which keys it hides
    "network/modules.py": {"__init__"},
    "kernels/layers.py": {"launch_layer_norm"},
    "kernels/triton/network.py": {"layer_norm_launch"},
    "network/execution.py": {"int8_linear", "patch_embedding", "_check_embedding"},
    "network/operator_arguments.py": {"check_linear"},
    # a call is made of an operator's arguments, in their order
    "specification/attention_call.py": {"int8_call"},
    # others' interfaces: scaled_dot_product_attention, and transformers' attention functions
    "integrations/sdpa.py": {"attend_or_fall_back"},
    "integrations/static_scales.py": {"static_attention"},
    "integrations/transformers.py": {"integer_attention_forward"},
}
"""Functions with more than :data:`MOST`, besides the public ones."""


def functions(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Return the functions of a file that run on the host, and how many parameters each has."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield node.name, len([each for each in given if each.arg not in ("self", "cls")])


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_have_few_parameters(path: pathlib.Path) -> None:
    allowed = MORE.get(path.relative_to(ROOT).as_posix(), set())
    assert {name for name, count in functions(path) if count > MOST} - PUBLIC == allowed - PUBLIC


MOST_OF_KERNELS = 25


def test_kernels_have_few_parameters() -> None:
    """Kernels and device functions: strides and the like are named tuples, constants are objects."""
    counts = {
        f"{path.relative_to(ROOT).as_posix()}:{node.name}": len(node.args.args)
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }
    assert len(counts) > 200
    assert {name: count for name, count in counts.items() if count > MOST_OF_KERNELS} == {}
