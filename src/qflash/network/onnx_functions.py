"""ONNX functions of a model's own: an operator of the network is one node, what it computes is written once a kind.

:func:`add_functions` looks at what a finished graph holds for each operator. Operators whose nodes are the same, but for the
numbers of their weights, call one function; tables, shapes and all numbers that they share are inside it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import helper

from .onnx_graph import OPSET, Span

DOMAIN = "qflash"
"""Of the functions."""
_SHAPES = {"Reshape": (1,), "Slice": (1, 2, 3), "ReduceSum": (1,), "ReduceMax": (1,), "TopK": (1,), "Expand": (1,)}
"""Inputs that say a shape, axes or a count: inference needs their numbers, so they are always inside."""


class _Call(NamedTuple):
    """An operator as a call of a function.

    Attributes:
        span: of it.
        nodes: of it.
        inputs: values that other operators make.
        constants: initializers by the place of their use: (number of the node, number of its input).
        outputs: values that others take.
    """

    span: Span
    nodes: list[Any]
    inputs: list[str]
    constants: dict[tuple[int, int], str]
    outputs: list[str]


def add_functions(model: Any, spans: Sequence[Span], tables: frozenset[str]) -> None:
    """Put the nodes of each operator into a function, and a call of it in their place; initializers inside leave the graph.

    Args:
        model: an ``onnx.ModelProto``, changed.
        spans: of operators, in order; those of less than two nodes stay.
        tables: initializers that belong inside though they are no single numbers.
    """
    graph = model.graph
    nodes, initializers = list(graph.node), {x.name: x for x in graph.initializer}
    taken = {x.name for x in (*graph.input, *graph.output)}
    readers: dict[str, set[int]] = {}
    for place, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, set()).add(place)
    groups: dict[Any, list[_Call]] = {}
    for span in spans:
        if span.end - span.start > 1:
            call = _call(span, nodes, initializers, readers, taken)
            groups.setdefault(_signature(call, initializers, tables), []).append(call)
    rows: dict[int, Any] = {}
    renamed: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for calls in groups.values():
        kind = calls[0].span.kind
        counts[kind] += 1
        name = kind if counts[kind] == 1 else f"{kind}_{counts[kind]}"
        function, lifted = _function(name, calls, initializers, tables)
        model.functions.append(function)
        for call in calls:
            given = call.inputs + [call.constants[place] for place in lifted]
            outputs = call.outputs
            if len(outputs) == 1 and outputs[0] not in taken and call.span.name not in taken:
                renamed[outputs[0]] = call.span.name
            rows[call.span.start] = helper.make_node(name, given, outputs, name=call.span.name, domain=DOMAIN)
    inside = {place for calls in groups.values() for call in calls for place in range(call.span.start, call.span.end)}
    kept = [rows.get(place, node) for place, node in enumerate(nodes) if place not in inside or place in rows]
    for node in kept:
        node.input[:] = [renamed.get(x, x) for x in node.input]
        node.output[:] = [renamed.get(x, x) for x in node.output]
    used = {name for node in kept for name in node.input}
    left = [x for x in graph.initializer if x.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(left)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _call(
    span: Span, nodes: Sequence[Any], initializers: Mapping[str, Any], readers: Mapping[str, set[int]], taken: set[str]
) -> _Call:
    own = list(nodes[span.start : span.end])
    made = {name for node in own for name in node.output}
    inputs: dict[str, None] = {}
    constants = {}
    for number, node in enumerate(own):
        for place, name in enumerate(node.input):
            if name in initializers:
                constants[number, place] = name
            elif name and name not in made:
                inputs[name] = None
    here = set(range(span.start, span.end))
    outputs = [name for node in own for name in node.output if name in taken or readers.get(name, set()) - here]
    return _Call(span, own, list(inputs), constants, outputs)


def _inner_names(call: _Call) -> dict[str, str]:
    """Return new names of a call's values, by the old ones: the same in all calls of a function."""
    names = dict(zip(call.inputs, _unique([*call.span.inputs, *("x" for _ in call.inputs)][: len(call.inputs)]), strict=True))
    count = itertools.count(1)
    return names | {name: f"{node.op_type}_{next(count)}" for node in call.nodes for name in node.output if name}


def _unique(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def _base(name: str) -> str:
    """Return what a constant is called within its operator: ``weight`` of ``blocks.0.mlp.fc1/weight_3``."""
    return name.rsplit("/", 1)[-1].rsplit("_", 1)[0]


def _is_fixed(call: _Call, place: tuple[int, int], tables: frozenset[str]) -> bool:
    """Tell whether a constant must be inside whatever its numbers: a shape or a table."""
    return place[1] in _SHAPES.get(call.nodes[place[0]].op_type, ()) or call.constants[place] in tables


def _signature(call: _Call, initializers: Mapping[str, Any], tables: frozenset[str]) -> Any:
    """Return what is the same of all calls of a function."""
    names = _inner_names(call)
    found: list[Any] = [call.span.kind, call.span.choices, len(call.inputs), tuple(names[name] for name in call.outputs)]
    for number, node in enumerate(call.nodes):
        inputs: list[Any] = []
        for place, name in enumerate(node.input):
            if (number, place) in call.constants:
                x = initializers[name]
                content = x.raw_data if _is_fixed(call, (number, place), tables) else None
                inputs.append((x.data_type, len(x.dims), content))
            else:
                inputs.append(names.get(name, name))
        attributes = tuple(sorted(each.SerializeToString(deterministic=True) for each in node.attribute))
        found.append((node.op_type, tuple(inputs), attributes, len(node.output)))
    return tuple(found)


def _function(
    name: str, calls: Sequence[_Call], initializers: Mapping[str, Any], tables: frozenset[str]
) -> tuple[Any, list[tuple[int, int]]]:
    """Return the function of calls of one signature, and the places of the constants that it takes as inputs.

    A single number that is the same in all calls is inside; weights, and what differs, are inputs.
    """
    first = calls[0]
    names = _inner_names(first)
    # uses that have one constant in every call are one input
    uses: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for place in first.constants:
        uses.setdefault(tuple(call.constants[place] for call in calls), []).append(place)
    lifted: list[tuple[str, list[tuple[int, int]]]] = []
    inside: list[tuple[str, list[tuple[int, int]]]] = []
    for each, places in uses.items():
        single = not initializers[each[0]].dims and len(set(each)) == 1
        (inside if single or any(_is_fixed(first, place, tables) for place in places) else lifted).append((each[0], places))
    inputs = _unique([names[each] for each in first.inputs] + [_base(constant) for constant, _ in lifted])
    constants = _unique([f"{_base(constant)}_value" for constant, _ in inside])
    body = []
    known: dict[tuple[int, int], str] = {}
    for inner, (_, places) in zip([*inputs[len(first.inputs) :], *constants], [*lifted, *inside], strict=True):
        known |= dict.fromkeys(places, inner)
    for inner, (constant, _) in zip(constants, inside, strict=True):
        tensor = onnx.TensorProto()
        tensor.CopyFrom(initializers[constant])
        tensor.name = inner
        body.append(helper.make_node("Constant", [], [inner], value=tensor))
    names |= {each: f"y_{number}" if number else "y" for number, each in enumerate(first.outputs)}
    for number, node in enumerate(first.nodes):
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        copied.input[:] = [known.get((number, place), names.get(x, x)) for place, x in enumerate(node.input)]
        copied.output[:] = [names.get(x, x) for x in node.output]
        copied.name = copied.output[0]
        body.append(copied)
    outputs = [names[each] for each in first.outputs]
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_function(DOMAIN, name, inputs, outputs, body, opsets, doc_string=first.span.about), [
        places[0] for _, places in lifted
    ]
