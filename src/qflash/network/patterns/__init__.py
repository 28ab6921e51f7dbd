"""From captured operations to the nodes of an integer network: which operator computes what, and on which grid.

The grammar is that of pre-norm transformers: ``norm, linear(s), attention, linear, +`` and ``norm, linear, activation, linear,
+`` on an int16 residual stream, patches before it, and a normalisation, a mean over tokens and a head behind it, in any order
that the operators allow. A normalisation may stand before the sum, or behind it, too. An operation that fits nowhere is refused
by name. Each rule makes an empty module with the sizes it needs, and leaves a function that fills it in from the ranges of a
calibration (:mod:`.conversion` has the numerics).

A rule is a function of a :class:`.builder.Builder` and an operation. ``rows`` reads views, ``streams`` and ``inputs`` find or
make what an operation takes, the other files have the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...specification.layers import ACTIVATIONS
from .. import conversion as cv
from ..capture.operations import Operation, wide
from ..conversion import Grid
from ..graph import IMAGES, IntegerNetwork
from .attention import lower_attention
from .builder import Builder, Ranges
from .layers import lower_activation, lower_add, lower_linear, lower_norm, lower_product
from .outputs import drop_tokens, lower_mean, lower_output, lower_select

RULES: dict[str, Callable[[Builder, Operation], None]] = {
    **dict.fromkeys(ACTIVATIONS, lower_activation),
    "add": lower_add,
    "attention": lower_attention,
    "linear": lower_linear,
    "mean": lower_mean,
    "norm": lower_norm,
    "product": lower_product,
    "select": lower_select,
}
"""By kind of operation; others come with what takes them."""


class Lowering(Builder):
    """Makes an integer network out of captured operations: :meth:`lower`, calibration, :meth:`fill`."""

    def lower(self) -> IntegerNetwork:
        """Return the network with empty modules.

        Raises:
            UnsupportedError: an operation fits into no pattern.
        """
        for operation in self.captured.operations:
            if (rule := RULES.get(operation.kind)) is not None:
                rule(self, operation)
        ends = {output.name: lower_output(self, output) for output in self.captured.outputs}
        network = IntegerNetwork(self.nodes, self.modules, self.image, self.recipe, ends)
        shapes = network.shapes()
        for output in self.captured.outputs:
            if len(output.view.shape) == 2 < len(shapes[ends[output.name]]) and output.arrangement is None:
                ends[output.name] = drop_tokens(self, output, ends[output.name], shapes[ends[output.name]][1])
        if ends != network.outputs:
            network = IntegerNetwork(self.nodes, self.modules, self.image, self.recipe, ends)
        return network

    def fill(self, network: IntegerNetwork, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float]) -> None:
        """Fill the network's modules in from what calibration saw.

        Args:
            network: of :meth:`lower`.
            ranges: of :attr:`observed`.
            mean, deviation: of the image channels, of pixels in [0, 1].

        Raises:
            ValueError: integers have no room for what a node computes; named.
        """
        self.mean, self.deviation = mean, deviation
        for group in self.groups:
            group.unit = max(cv.unit_of(*(ranges[node] for node in group.seen)), group.most / 32767)
        for node, fill in self.fillers:
            try:
                fill(ranges)
            except ValueError as error:
                raise ValueError(f"node {node!r}: {error}") from error
        units = {name: group.unit for name, (_, group) in self.references.items() if group is not None}
        for name, unit in {IMAGES: 1.0, **units, **self.scales}.items():
            self.grids[name] = Grid(wide(unit), wide(0.0))
        self.grids.update({name: self.grids[source] for name, source in self.selected.items()})
        network.scales = {name: self.scales[node] for name, node in network.outputs.items()}
        network.units = tuple(dict.fromkeys(group.unit for group in self.groups))
