"""How far an integer network is from its float model, node by node: :func:`compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..specification.texts import PADDING
from .calibration import progress_bar
from .float_parts import with_float_parts
from .graph import IntegerNetwork, check_network
from .inputs import check_input, takes_ids
from .modules import LayerNorm, Linear
from .operators.narrow import Narrow
from .patterns import Lowering
from .quality import of_tokens, sqnr_db

_ENDS = {torch.int8: (-128, 127), torch.int16: (-32768, 32767)}


@dataclasses.dataclass(frozen=True)
class NodeError:
    """How far the output of a node is from what it stands for in the float model.

    Attributes:
        name: of the node.
        kind: of its operator.
        sqnr_db: signal-to-quantisation-noise ratio, which holds the errors of all nodes before.
        saturated_share: share of its elements at an end of their type.
        is_stream: whether it is the residual stream.
    """

    name: str
    kind: str
    sqnr_db: float
    saturated_share: float
    is_stream: bool


def node_errors(network: IntegerNetwork, lowering: Lowering, images: torch.Tensor, normalised: torch.Tensor) -> list[NodeError]:
    """Compare the output of every node with what it stands for.

    Args:
        network: integer.
        lowering: that the network was made of.
        images: uint8.
        normalised: the same as the float model takes them.
    """
    computed = lowering.captured.compute(normalised)
    rows: list[NodeError] = []

    def seen(name: str, out: torch.Tensor) -> None:
        if name not in lowering.references or name not in lowering.grids:
            return
        view, group = lowering.references[name]
        got, share = out.to(torch.float64), 0.0
        counted = of_tokens(torch.ones_like(got), images)
        if out.dtype in _ENDS:
            grid = lowering.grids[name]
            got = got * grid.step.to(got) + grid.middle.to(got)
            least, most = _ENDS[out.dtype]
            share = float((((out == least) | (out == most)) * counted).sum() / counted.sum())
        kind = type(network.part(name)).__name__
        want = view.evaluate(computed[view.source]).reshape(got.shape)
        got, want = of_tokens(got, images), of_tokens(want, images)
        rows.append(NodeError(name, kind, sqnr_db(want, got), share, group is not None))

    with torch.inference_mode():
        network.run(images, seen)
    return rows


def branches(network: IntegerNetwork) -> dict[str, list[str]]:
    """Return the nodes of each residual branch, by the name of the submodule that they share."""
    inputs = {node.name: node.inputs for node in network.nodes}
    found: dict[str, list[str]] = {}
    for node in network.nodes:
        part = network.part(node.name)
        if not isinstance(part, (Linear, LayerNorm)) or len(node.inputs) < 2:
            continue
        names, waiting = [], [node.inputs[0]]
        while waiting:
            name = waiting.pop()
            if name not in names and not isinstance(network.part(name), (LayerNorm, Narrow)):
                names.append(name)
                waiting += [each for each in inputs[name] if each in inputs]
        names.append(node.name)
        paths = [name.split(".") for name in names]
        label = [words[0] for words in zip(*paths, strict=False) if len(set(words)) == 1]
        found[".".join(label) or node.name] = names
    return found


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An integer network beside its float model on images.

    Attributes:
        sqnr_db: of each output.
        nodes: errors node by node; they add up on the way.
        contributions: by residual branch, how many dB the worst output gains if that branch alone computes in floating point.
    """

    sqnr_db: dict[str, float]
    nodes: list[NodeError]
    contributions: dict[str, float]

    def __str__(self) -> str:
        lines = [f"{name}: {db:.1f} dB" for name, db in self.sqnr_db.items()]
        lines += [f"{'node':50} {'operator':16} {'dB':>6} {'at the ends':>12}"]
        lines += [f"{row.name:50} {row.kind:16} {row.sqnr_db:6.1f} {100 * row.saturated_share:10.3f} %" for row in self.nodes]
        lines += ["gain in dB with one branch in floating point:"]
        order = sorted(self.contributions.items(), key=lambda each: -each[1])
        return "\n".join([*lines, *(f"{name:50} {gain:6.2f}" for name, gain in order)])

    def plot(self) -> Any:
        """Draw the error of every node and the gain of every branch; return matplotlib's figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from ..optional_packages import require_packages

        require_packages("Comparison.plot", "matplotlib")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.5 + 0.2 * max(len(self.nodes), len(self.contributions))), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.barh([row.name for row in self.nodes], [row.sqnr_db for row in self.nodes])
        left.set_xlabel("SQNR behind the node, dB")
        right.barh(list(self.contributions), list(self.contributions.values()))
        right.set_xlabel("gain of the output with the branch in floating point, dB")
        for axes in (left, right):
            axes.invert_yaxis()
            axes.tick_params(labelsize=6)
        return figure


def compare(
    network: IntegerNetwork, model: nn.Module, images: Any, *, mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None, contributions: bool = True, progress: bool = True,
) -> Comparison:  # fmt: skip
    """Compare an integer network with its float model, node by node.

    The error at a node includes the errors of all nodes before it. What a part costs is found by computing one residual
    branch at a time in floating point.

    Args:
        network: as :func:`qflash.quantize_model` returned it; a network from a file lacks the units of its nodes.
        model: the float model that it was made of; with another one the figures mean nothing.
        images: uint8 (batch, channels, height, width); or ids of tokens, or what a tokeniser returns.
        mean, std: as for :func:`qflash.quantize_model`.
        contributions: whether to compute branches in floating point, which runs the network once for each.
        progress: show a bar.

    Raises:
        TypeError: ``network`` is not an integer network, or images are not uint8.
        ValueError: the network was loaded from a file, or images have another size.
    """
    from .quantize import Preparation, find_statistics

    check_network(network)
    lowering = network.lowering
    if lowering is None:
        raise ValueError(
            "network must be the one that quantize_model returned; one from a file, and that of a further size, does not know "
            "its model"
        )
    images = network.prepared(images)
    if network.is_padded and isinstance(images, torch.Tensor) and images.dim() == 2:
        # the float model is compared at the length of calibration
        images = nn.functional.pad(images, (0, max(0, network.image[0] - images.shape[1])), value=PADDING)
    check_input(images, network.image)
    parameter = next(model.parameters())
    statistics = ([0.0], [1.0]) if takes_ids(network.image) else find_statistics(model, network.image[0], mean, std)
    prepare = Preparation(*statistics, parameter.device)
    with torch.inference_mode():
        wanted = lowering.captured.pick(lowering.captured.select(model)(prepare(images, parameter.dtype)))

    def judged(each: IntegerNetwork) -> dict[str, float]:
        found = each.dequantize(each.run(images))
        return {name: sqnr_db(of_tokens(want.float(), images), of_tokens(found[name], images)) for name, want in wanted.items()}

    with torch.inference_mode():
        whole = judged(network)
        gains = {}
        parts = branches(network) if contributions else {}
        with progress_bar(progress and bool(parts), "branches") as tick:
            for label, names in parts.items():
                if all(name in lowering.twins for name in names):
                    exact = with_float_parts(network, lowering.twins, lowering.grids, names)
                    gains[label] = min(judged(exact).values()) - min(whole.values())
                tick(1)
        return Comparison(whole, node_errors(network, lowering, images, prepare(images, torch.float32)), gains)
