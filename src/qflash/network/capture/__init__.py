"""From any float module to a list of its computing operations: :func:`capture`.

``torch.export`` traces the module. Its graph is then interpreted with symbolic tensors: each is a rearrangement of the output
of one operation, times a constant, plus a constant (:class:`.operations.View`). So reshapes, transposes, window partitions,
rolls, class tokens, position embeddings, layer scale and dropout are no operations: they are the way from one operation to the
next, however a model spells them. What only depends on constants is computed once.

``tracer`` goes through the graph; what becomes of an operation of ATen stands in ``moves``, ``elements``, ``products``,
``attention``, ``einsum``, ``norms`` and ``texts``, each with a table of functions by operation.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree
from torch import fx, nn

from ...torch_internals import tracing_alone
from ..outputs import OutputsOf, Selected, bare, copy_of, names_of, parameters_of, select_outputs
from . import attention, einsum, elements, moves, norms, products, texts
from .captured import Captured, output_of
from .operations import BATCH, Operation, UnsupportedError, View, are_apart, begins_with_batch, place_of_rows
from .tracer import ARGUMENTS, Handler, Tracer, is_computed
from .unread import used_operations

_HANDLERS: dict[Any, Handler] = functools.reduce(
    operator.or_, (part.HANDLERS for part in (moves, elements, products, attention, einsum, norms, texts))
)


def capture(
    model: nn.Module, images: torch.Tensor, outputs: Sequence[str] | OutputsOf | None = None,
    refusals: list[str] | None = None, *, padded: bool = False,
) -> Captured:  # fmt: skip
    """Trace a module in eval mode and list its operations.

    Args:
        model: takes images (batch, channels, height, width), or ids (batch, tokens), and returns a tensor, or several with
            names.
        images: of the model's dtype and device, :data:`BATCH` of them; or ids.
        outputs: those that are wanted, see :func:`qflash.quantize_model`.
        refusals: where messages go for operations without an integer form, which are passed over; None raises the first.
        padded: whether the model takes ids with an attention mask; here ids are negative where there is no token.

    Raises:
        UnsupportedError: an operation has no integer form.
        TypeError, ValueError: ``outputs`` are no such, or an output is unknown.
    """
    select = functools.partial(select_outputs, outputs=outputs, padded=padded)
    selected = select(model)
    wanted, outputs = outputs, None if callable(outputs) else outputs
    with torch.no_grad():
        try:
            try:
                program = _traced(selected, images)
            except Exception as error:
                if outputs is None or isinstance(selected, Selected) or not _returns_more(error):
                    raise
                select = functools.partial(select, alone=True)
                selected = select(model)
                program = _traced(selected, images)
        except Exception as error:
            # what follows is of torch.export's own settings
            reason = traceback.format_exception_only(error)[-1].strip().partition("\n")[0][:400]
            if advice := _help(error, model, outputs):
                reason = reason.partition(". ")[0].partition("! ")[0]
            raise UnsupportedError(f"torch.export cannot trace the model: {reason}{advice}") from error
        module: Any = program.module()
        last = next(n for n in module.graph.nodes if n.op == "output")
        nodes = dict(zip(_output_names(program), last.args[0], strict=True))
        names = (
            list(outputs)
            if outputs is not None
            else ["logits"]
            if "logits" in nodes and wanted is None
            else [x for x in nodes if nodes[x] is not None]
        )
        if not names:
            raise ValueError("outputs must return a tensor, a tuple or a dictionary of tensors, got none")
        for name in names:
            if nodes.get(name) is None:
                known = dict.fromkeys((*nodes, *names_of(bare(model))))
                raise ValueError(f"outputs must be of {', '.join(map(repr, known))}, or a submodule's name, got {name!r}")
        last.args = (tuple(nodes[name] for name in names),)
        module.graph.eliminate_dead_code()
        # takes images and returns a tuple, whatever the model's own arguments and results are
        module.graph.set_codegen(fx.graph.CodeGen())
        module.recompile()
        visible = None
        if padded:
            # the second text ends in the middle
            visible = torch.ones(images.shape, dtype=torch.bool, device=images.device)
            visible[1, (images.shape[1] + 1) // 2 :] = False
        tracer = Tracer(module, _HANDLERS, isinstance(selected, Selected), refusals, visible)
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        tracer.node = places[0]
        view = tracer.made("images", (), (), (images.numel() // images.shape[-1], images.shape[-1]))
        try:
            found = tracer.run(dataclasses.replace(view, shape=tuple(images.shape)), *[None] * (len(places) - 1))
        except UnsupportedError as error:
            advice = _without([tracer.node], last, names)
            raise UnsupportedError(f"{error}{advice}") from None
        except ARGUMENTS as error:
            refusal = tracer.refusal(f"{tracer.node.target} ({type(error).__name__}: {error})")
            raise UnsupportedError(f"{refusal}{_without([tracer.node], last, names)}") from error
    if refusals:
        advice = _without(tracer.refused, last, names)
        refusals[:] = [f"{text}{advice}" for text in refusals]
    for name, each in zip(names, found, strict=True):
        if not isinstance(each, View):
            if isinstance(each, moves.Stacked):
                why = "is several tensors, stacked; outputs can return them one by one"
            elif is_computed(each):
                why = "is a step on the way to attention or a normalisation"
            else:
                why = "does not depend on the images"
            others = [other for other, x in zip(names, found, strict=True) if isinstance(x, View)]
            raise UnsupportedError(f"output {name!r} {why}" + f"; outputs={others} leaves it out" * bool(others))
        if each.source.kind == "images":
            raise UnsupportedError(f"output {name!r} is the images, rearranged; outputs can name others")
        # of what follows an operation that was refused nothing is known
        if each.source.kind != "unknown" and not begins_with_batch(each):
            sizes = ", ".join(map(str, nodes[name].meta["val"].shape))
            raise UnsupportedError(
                f"output {name!r} must have the batch first, has shape ({re.sub(r's[0-9]+', 'batch', sizes)})"
            )
    operations = used_operations(tracer.operations, found)
    if not refusals:
        _require_images_apart(operations)
    return Captured(
        module,
        operations,
        [output_of(name, x, nodes[name], list(nodes).index(name)) for name, x in zip(names, found, strict=True)],
        select,
        _places(tracer, images.shape[1]) if padded else {},
        tracer.filler,
    )


def _traced(model: nn.Module, images: torch.Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim.DYNAMIC}
    with tracing_alone():
        return torch.export.export(copy_of(model), (images,), dynamic_shapes=(batch,), strict=False)


def _returns_more(error: Exception) -> bool:
    """Tell whether an error of ``torch.export`` is about what a model returns besides tensors, as a cache."""
    return "in output, which is not a known type" in str(error)


def _help(error: Exception, model: nn.Module, outputs: Any) -> str:
    """Say what to do about an error of ``torch.export``; arguments as of :func:`capture`."""
    if isinstance(error, TypeError) and "missing a required argument" in str(error):
        return "; a network takes images or texts alone, and outputs can be a function that gives the model the rest"
    if "specialized it to be a constant" in str(error):
        return "; the model must work for any batch: x.shape[0] or -1 in place of len(x) or a number"
    # by name, since its module loads sympy
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "; the model, or a hook, looks at a tensor's values: float(x), x.item(), if x > 0"
    if _returns_more(error):
        leaves = "outputs=['last_hidden_state'], or another list of names, leaves it out"
        return f"; {leaves if outputs is None else f'outputs={list(outputs)} must name tensors that the model returns'}"
    if outputs is None and {"input_ids", "pixel_values"} <= parameters_of(model.forward).keys():
        if not hasattr(model, "get_image_features"):
            return "; it takes images and texts at once, and a network takes one of them"
        return (
            "; it has two towers, and a network is one of them: outputs=lambda model, x: model.get_image_features(x), or "
            "get_text_features"
        )
    return ""


def _behind(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that need them."""
    found, left = set(nodes), list(nodes)
    while left:
        further = [x for x in left.pop().users if x not in found]
        found.update(further)
        left += further
    return found


def _without(nodes: Sequence[fx.Node], last: fx.Node, names: Sequence[str]) -> str:
    """Say which outputs do not need nodes that have no integer form; nothing where one writes to a tensor that others read.

    Args:
        nodes: of the traced graph.
        last: that returns the outputs.
        names: of the outputs, in their order.
    """
    if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in nodes):
        return ""
    needing = _behind(nodes)
    # a size is no image
    images = next(n for n in last.graph.nodes if n.op == "placeholder")
    computed = _behind([n for n in images.users if n.target is not torch.ops.aten.sym_size.int])
    returned: Any = last.args[0]
    others = [name for name, x in zip(names, returned, strict=True) if x in computed and x not in needing]
    return f"; outputs={others} leaves it out" if others else ""


def _require_images_apart(operations: Sequence[Operation]) -> None:
    """Require operations that take of each image what was computed of it.

    Raises:
        UnsupportedError: one takes of an image what was computed of another.
    """
    for each in operations:
        if not all(map(are_apart, each.inputs)):
            name = each.name or "the model"
            raise UnsupportedError(f"{each.kind} of {name} has no integer form: it takes of an image what is of another one")


def _places(tracer: Tracer, tokens: int) -> dict[fx.Node, torch.Tensor]:
    """Return :attr:`Captured.tokens` of what was interpreted, of texts of so many tokens."""
    found: dict[fx.Node, torch.Tensor] = {}
    for node, x in tracer.env.items():
        if not isinstance(x, View) or (place := place_of_rows(x.source, tokens)) is None:
            continue
        rows = x.places().reshape(-1, x.shape[-1])
        row = rows[:, 0].div(x.source.channels, rounding_mode="floor")
        if bool((row >= 0).all()) and torch.equal(rows[:, -1] // x.source.channels, row):
            found[node] = place[row[row < x.source.rows // BATCH]]
    return found


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """Return names of a program's outputs: fields, or ``"output"`` with a number where there are several."""
    spec = program.call_spec.out_spec
    assert spec is not None
    count = spec.num_leaves
    made = torch.utils._pytree.tree_unflatten(list(range(count)), spec)
    if isinstance(made, dict):
        names = [""] * count
        for name, x in made.items():
            leaves = torch.utils._pytree.tree_leaves(x)
            for number, leaf in enumerate(leaves):
                names[leaf] = name if len(leaves) == 1 else f"{name}.{number}"
        return names
    return ["output"] if count == 1 else [f"output{number}" for number in range(count)]
