"""An integer network: an ordered list of operators between named values, :class:`IntegerNetwork`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ..integrations.images import check_size
from ..scalars import whole_number
from ..specification.recipe import Recipe
from ..torch_internals import has_global_hooks
from .cpu_graph import CpuGraph
from .cuda_graph import NetworkGraph
from .inputs import IMAGES as IMAGES
from .inputs import TEXT, check_input, check_sizes, input_dtype, input_shape, takes_ids, text_ids
from .mixed_sizes import run_mixed
from .modules import EXTRA_STATE, LOADED, Attention, First, IntegerModule, Linear, Mean, Widen, is_hooked
from .operators.gated import Gated
from .operators.rotary import Rotary
from .operators.token_embedding import TokenEmbedding
from .operators.tokens import Tokens
from .quality import Quality
from .sizes import OtherSize, dequantized, key_of, module_tree, own_copy, shown

_NAME = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)*")


class Node(NamedTuple):
    """One operator of a network.

    Attributes:
        name: of its module, and of its output.
        inputs: names of the values it takes, of earlier nodes or :data:`IMAGES`.
    """

    name: str
    inputs: tuple[str, ...]


def _has_places(part: IntegerModule) -> bool:
    """Tell whether a module other than the embedding of tokens has a number for each place of a text."""
    tables = (getattr(part, name, None) for name in ("gather", "scatter"))
    if isinstance(part, Attention) and (part.bias is not None or part.first > 1):
        return True
    # the first token is there in every text
    if isinstance(part, Mean) and part.tokens == 1 and part.first == 0:
        return False
    if (isinstance(part, Widen) and part.token) or (isinstance(part, First) and part.count > 1):
        return True
    return isinstance(part, (Mean, Rotary, Tokens)) or any(x is not None for x in tables)


def _weights_stay() -> AbstractContextManager[None]:
    """Make a context for a forward pass, which writes no weights. Kernels are imported when they are used."""
    from ..kernels.settled import weights_stay

    return weights_stay()


def _users_code() -> AbstractContextManager[None]:
    """Make a context for a module that runs code of a user, which may write the weights of others."""
    from ..kernels.settled import weights_may_change

    return weights_may_change()


class IntegerNetwork(IntegerModule):
    """A quantised network: uint8 images in, int32 out, integers between.

    Its nodes are run in their order, and everything that runs, saves, exports or compares a network goes through this list.

    Attributes:
        nodes: its operators.
        parts: the module of each node, by its name.
        image: (channels, height, width) of an image; (tokens, vocabulary) of a network that takes ids of tokens.
        others: what it has of its own at further image sizes, by their names.
        recipe: of attention.
        outputs: the node of each output, by the output's name.
        scales: what a unit of each output stands for, a float: ``logits.float() * scale``. A network computes nothing with it.
        units: what a unit of each residual stream stands for; nothing is computed with them either.
        backend: of every operator, see :func:`qflash.attention`.
        quality: how close it is to the float model (:class:`.quality.Quality`), as found when it was quantised; None where that
            is not known, as of a file that does not say it.
        about: what files keep for people: ``"name"`` of the float model, ``"labels"`` of its classes, and ``"images"``, which
            :func:`qflash.image_transform` takes. Nothing is computed with it.
        is_padded: whether it takes texts with places without a token, whose ids are negative: ``attention_mask`` says where.
        takes_shorter: whether texts may have fewer tokens than those of calibration.
        lowering: what the network was made of, for :func:`qflash.compare`; None of a network from a file, or a copy.
    """

    def __init__(
        self, nodes: Sequence[Node], modules: Mapping[str, IntegerModule], image: Sequence[int], recipe: Recipe,
        outputs: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Put modules together.

        Raises:
            ValueError: names are not unique or unknown, or the image has no size.
        """
        super().__init__()
        self.nodes = tuple(nodes)
        self.image: tuple[int, ...] = tuple(image)
        self.recipe = recipe
        self.outputs = dict(outputs)
        self.scales = dict.fromkeys(outputs, 1.0)
        self.units: tuple[float, ...] = ()
        self.backend = "auto"
        self.quality: Quality | None = None
        self.about: dict[str, Any] = {}
        self.lowering: Any = None
        self._check_names()
        self.parts = module_tree({node.name: modules[node.name] for node in self.nodes})
        self.others = nn.ModuleDict()
        parts = [self.part(node.name) for node in self.nodes]
        self.is_padded = any(isinstance(part, TokenEmbedding) and part.padded for part in parts)
        self.takes_shorter = self.is_padded and not any(map(_has_places, parts))
        self._last_use = {name: index for index, node in enumerate(self.nodes) for name in node.inputs}
        self._last_use.update(dict.fromkeys(outputs.values(), len(self.nodes)))

    def _check_names(self) -> None:
        check_sizes(self.image)
        known = {IMAGES}
        for node in self.nodes:
            if not _NAME.fullmatch(node.name) or node.name in known:
                raise ValueError(f"nodes must have names of their own, of letters, digits, _ and dots, got {node.name!r}")
            if missing := [name for name in node.inputs if name not in known]:
                raise ValueError(f"node {node.name!r} must take earlier values, takes {missing[0]!r}")
            known.add(node.name)
        if not self.outputs or not set(self.outputs.values()) <= known - {IMAGES}:
            raise ValueError(f"outputs must name nodes, got {self.outputs}")

    def part(self, name: str) -> IntegerModule:
        """Return the module of a node."""
        module = self.parts.get_submodule(name)
        assert isinstance(module, IntegerModule)
        return module

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of the images that the network takes, the first first; none of a network that takes ids."""
        return tuple((image[1], image[2]) for image in (self.image, *(x.image for x in self.other_sizes())) if len(image) == 3)

    def other_sizes(self) -> list[OtherSize]:
        """Return what the network has of its own at further sizes."""
        return [other for other in self.others.values() if isinstance(other, OtherSize)]

    def add_size(self, other: OtherSize) -> None:
        """Take images of a further size, too."""
        self.others[key_of(other.image[1:])] = other
        other.link(self.part)

    def _other(self, size: Sequence[int]) -> OtherSize | None:
        """Return what the network has of its own at a size; None at the first.

        Raises:
            ValueError: it takes no such images.
        """
        if tuple(size) == self.image[1:]:
            return None
        name = key_of(size)
        if name not in self.others:
            known = ", ".join(map(shown, self.image_sizes))
            raise ValueError(f"images must have one of the network's sizes, {known} (height x width), got {shown(size)}")
        found = self.others[name]
        assert isinstance(found, OtherSize)
        return found

    def at(self, size: int | Sequence[int]) -> IntegerNetwork:
        """Return the network of one of :attr:`image_sizes` alone; it has the same tensors.

        Args:
            size: (height, width), or pixels of each side.

        Raises:
            ValueError: the network takes no such images.
        """
        wanted = check_size(size)
        if wanted is None or not self.image_sizes:
            raise ValueError(
                f"size must be one of the network's, {', '.join(map(shown, self.image_sizes)) or 'which has none'}"
            )
        other = self._other(wanted)
        modules = {
            node.name: own_copy(
                other.part(node.name) if other is not None and node.name in other.names else self.part(node.name)
            )
            for node in self.nodes
        }
        made = IntegerNetwork(self.nodes, modules, self.image if other is None else other.image, self.recipe, self.outputs)
        made.scales, made.units, made.backend, made.about = dict(self.scales), self.units, self.backend, dict(self.about)
        made.quality = self.quality if other is None else other.quality
        made.lowering = self.lowering if other is None else None
        made.training = self.training
        return made

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.link()
        return self

    def link(self) -> None:
        """Have further sizes use the tensors of the first one where they have none of their own."""
        for other in self.other_sizes():
            other.link(self.part)

    def __getstate__(self) -> dict[str, Any]:
        # what the network was made of holds the float model's weights
        return {**self.__dict__, "lowering": None}

    def extra_repr(self) -> str:
        lines = ["quality unknown" if self.quality is None else f"quality: {self.quality}"]
        lines += [f"{shown(other.image[1:])}: {other.quality or 'quality unknown'}" for other in self.other_sizes()]
        return "\n".join(lines)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError("torch.jit.script cannot take an integer network: use torch.export or torch.compile")

    @property
    def output_scale(self) -> float:
        """What a unit of the output stands for, of a network with one.

        Raises:
            ValueError: there are several; :attr:`scales` has them by name.
        """
        if len(self.scales) != 1:
            raise ValueError(f"the network has several outputs, whose units scales has: {', '.join(self.scales)}")
        return next(iter(self.scales.values()))

    def float_parts(self) -> list[str]:
        """Name the nodes that are kept in floating point; none in a network that is ready."""
        from .float_parts import float_nodes

        return float_nodes(self)

    def prepared(
        self, images: Any = None, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return what :meth:`run` takes, of what :meth:`forward` takes.

        Raises:
            TypeError, ValueError: it is something else.
        """
        texts = zip(TEXT, (input_ids, attention_mask, token_type_ids), strict=True)
        given = {name: x for name, x in texts if x is not None}
        if isinstance(images, Mapping) and not takes_ids(self.image):
            raise TypeError(
                "the network takes a tensor of images, uint8 (batch, channels, height, width), got a dictionary of "
                f"{', '.join(map(repr, images)) or 'nothing'}"
            )
        if isinstance(images, Mapping):
            given, images = {name: x for name, x in images.items() if name in TEXT} | given, None
        if takes_ids(self.image):
            if images is not None and given:
                if "input_ids" in given:
                    raise TypeError("input_ids must be given once, got the first argument and input_ids=")
                given["input_ids"] = images
            return text_ids(given, self.is_padded) if given or images is None else images
        if given or images is None:
            if images is not None:
                # a tracer gives all arguments, and is named there
                check_input(images, self.image)
            raise TypeError(f"the network takes images, uint8 (batch, channels, height, width), got {', '.join(given) or None}")
        found: torch.Tensor = images
        return found

    def forward(
        self, images: Any = None, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Compute the outputs for a batch of images, or of texts.

        Args:
            images: uint8 (batch, image channels, height, width), RGB, not normalised, of one of :attr:`image_sizes`; a list of
                (image channels, height, width) of several of these sizes; or ids, int32 or int64 (batch, tokens), of a network
                that takes these, negative where there is no token; or what a tokeniser returns, a dictionary.
            input_ids: ids, as tokenisers name them: ``network(**tokenizer(texts, return_tensors="pt", padding=True))``.
            attention_mask: (batch, tokens), 0 where there is no token; only of a network whose calibration texts had one.
            token_type_ids: (batch, tokens), which must be 0.

        Returns:
            int32 (batch, outputs), or features of a network without a head. Multiplied by ``output_scale`` it is in the float
            network's unit. A network with several outputs returns a dictionary; ``scales`` has their units. For a list of
            images an output with one row an image is in the order of the list, and an output of tokens is a list of (tokens,
            channels).

        Raises:
            TypeError, ValueError: images are of another type or size.
        """
        taken: Any = self.prepared(images, input_ids, attention_mask, token_type_ids)
        found = run_mixed(self, taken) if isinstance(taken, (list, tuple)) else self.run(taken)
        return found if len(found) > 1 else next(iter(found.values()))

    def product_of(self, index: int, parts: Mapping[str, IntegerModule]) -> str | None:
        """Name the gated product that follows a node, if it is a linear layer to int16 that nothing else takes; else None.

        Hooks of either see it called by itself.
        """
        (name, inputs), last = self.nodes[index], index + 1 == len(self.nodes)
        if last or self.nodes[index + 1].inputs != (name,) or self._last_use[name] != index + 1:
            return None
        layer, after = parts[name], self.nodes[index + 1].name
        fits = type(layer) is Linear and layer.dtype == torch.int16 and layer.scatter is None and len(inputs) == 1
        fits = fits and isinstance(parts[after], Gated)
        return after if fits and not is_hooked(layer) and not is_hooked(parts[after]) else None

    def run(self, images: torch.Tensor, seen: Callable[[str, torch.Tensor], None] | None = None) -> dict[str, torch.Tensor]:
        """Return the outputs by name, of images as :meth:`forward` takes them.

        Args:
            images: uint8 (batch, image channels, height, width), of one of :attr:`image_sizes`; or ids, negative where there is
                no token.
            seen: is called with each node's name and output.
        """
        parts = self.parts_for(images)
        # a user's function may do anything, and a compiler sees operators, no launches
        promised = seen is None and not torch.compiler.is_compiling() and not has_global_hooks()
        with _weights_stay() if promised else nullcontext():
            return self._run(images, parts, seen)

    def _run(
        self, images: torch.Tensor, parts: dict[str, IntegerModule], seen: Callable[[str, torch.Tensor], None] | None
    ) -> dict[str, torch.Tensor]:
        values = {IMAGES: images}
        for index, node in enumerate(self.nodes):
            if node.name in values:
                continue
            part, after = parts[node.name], None if seen is not None else self.product_of(index, parts)
            if after is not None:
                product = parts[after]
                assert isinstance(product, Gated) and isinstance(part, Linear)
                values[after] = product.behind(part, values[node.inputs[0]], self.backend)
            else:
                with _users_code() if is_hooked(part) else nullcontext():
                    values[node.name] = part(*(values[x] for x in node.inputs), backend=self.backend)
            if seen is not None:
                seen(node.name, values[node.name])
            self.forget(values, index)
        return {name: values[node] for name, node in self.outputs.items()}

    def parts_for(self, images: torch.Tensor) -> dict[str, IntegerModule]:
        """Return the modules of the nodes, by name, that images of a size, or ids, need.

        Raises:
            TypeError, ValueError: they are of another type or size.
        """
        other = None
        if self.others and isinstance(images, torch.Tensor) and images.dim() == 4:
            other = self._other(images.shape[2:])
        check_input(images, self.image if other is None else other.image, shorter=self.takes_shorter)
        return {
            node.name: self.part(node.name) if other is None or node.name not in other.names else other.part(node.name)
            for node in self.nodes
        }

    def forget(self, values: dict[str, Any], index: int) -> None:
        """Take out of values by node those that no node behind one, of a number, needs."""
        for name in self.nodes[index].inputs:
            if self._last_use[name] == index:
                values.pop(name, None)

    def check_values(self) -> None:
        """Look whether all integers keep their bounds, and whether the operators fit each other.

        Raises:
            ValueError: something does not; the message names the node.
        """
        for node in self.nodes:
            try:
                self.part(node.name).check_values()
            except ValueError as error:
                raise ValueError(f"{node.name}: {error}") from error
        inputs = {node.name: node.inputs for node in self.nodes}
        for name, made in self.outputs.items():
            part = self.part(made)
            if isinstance(part, Tokens) and inputs[made][0] in inputs:
                part = self.part(inputs[made][0])
            if not isinstance(part, Widen) and getattr(part, "dtype", None) != torch.int32:
                raise ValueError(f"output {name!r} must be of int32, is of {made}")
        self._check_tokens()
        for size in self.image_sizes[1:]:
            try:
                self.at(size).check_values()
            except ValueError as error:
                raise ValueError(f"at {shown(size)} pixels: {error}") from error

    def _check_tokens(self) -> None:
        """Require tokens that are gathered or scattered to be there, and operators to take what they are given."""
        try:
            shapes = self.shapes()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(f"its operators do not fit each other: {str(error).splitlines()[0]}") from error
        for node in self.nodes:
            part, taken = self.part(node.name), shapes[node.inputs[0]]
            for name in ("gather", "scatter"):
                table = getattr(part, name, None)
                if not isinstance(table, torch.Tensor):
                    continue
                count = taken[1]
                if table.numel() and not (int(table.min()) >= 0 and int(table.max()) < count):
                    raise ValueError(f"{node.name}: {name} must be tokens from 0 to {count - 1}")
                if name == "scatter" and len(table.unique()) != count:
                    raise ValueError(f"{node.name}: scatter must bring every token to a place of its own")
            if isinstance(part, Widen) and part.token is not None and part.token >= taken[1]:
                raise ValueError(f"{node.name}: token must be from 0 to {taken[1] - 1}, got {part.token}")
            if isinstance(part, Mean) and len(taken) == 3 and part.first + part.tokens > taken[1]:
                raise ValueError(f"{node.name}: it averages tokens up to {part.first + part.tokens} of {taken[1]}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every value for one image, by the name of its node."""
        found: dict[str, tuple[int, ...]] = {IMAGES: (1, *input_shape(self.image))}
        images = torch.empty(found[IMAGES], dtype=input_dtype(self.image), device="meta")
        self._on_meta().run(images, lambda name, x: found.update({name: tuple(x.shape)}))
        return found

    def _on_meta(self) -> IntegerNetwork:
        """Return a network of the same shapes, without numbers."""
        from .modules import shapes_only

        with shapes_only():
            modules = {node.name: type(self.part(node.name))(**self.part(node.name).sizes) for node in self.nodes}
            for name, module in modules.items():
                for constant in module.constants:
                    setattr(module, constant, getattr(self.part(name), constant))
            return IntegerNetwork(self.nodes, modules, self.image, self.recipe, self.outputs)

    def get_extra_state(self) -> torch.Tensor:
        """Return what a ``state_dict`` holds beside the tensors: the header of a file, JSON as a uint8 tensor."""
        from .storage import header_tensor

        return header_tensor(self)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        from .storage import load_state, state_names

        names = {**state_names(self), EXTRA_STATE: EXTRA_STATE}
        given = {name: state_dict[prefix + key] for key, name in names.items() if prefix + key in state_dict}
        if given:
            try:
                load_state(self, given, assign=local_metadata.get("assign_to_params_buffers", False))
            except ValueError as error:
                error_msgs.append(
                    f"{prefix.rstrip('.') or type(self).__name__} stays as it is: {error}; network.save and qflash.load_model "
                    "keep all of an integer network"
                )
            state_dict.update({prefix + key: LOADED for key, name in names.items() if name in given})
        elif strict:
            missing_keys.append(prefix + EXTRA_STATE)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def graph(self, batch: int, size: int | Sequence[int] | None = None) -> NetworkGraph | CpuGraph:
        """Capture the forward pass of so many images, and return what replays it: images in, logits out.

        On an NVIDIA GPU a CUDA graph; on a CPU one call of C, with packed weights. The network stays as it is. A graph knows
        nothing of later changes: moved, or loaded with other weights, capture it again.

        Args:
            batch: images a call, at least 1.
            size: of :attr:`image_sizes`; the first if None.

        Raises:
            TypeError, ValueError: ``batch`` is not such a number, ``size`` is not such a size; or, on a CPU, a node has no C
                kernel.
            RuntimeError: there are no C kernels on this machine.

        Example::

            run = network.cuda().graph(64)
            logits = run(images)
        """
        batch = whole_number("batch", batch, 1)
        network = self if size is None else self.at(size)
        return (NetworkGraph if next(self.buffers()).device.type == "cuda" else CpuGraph)(network, batch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a file; see :func:`qflash.load_model`."""
        from .storage import save_model

        save_model(self, path)

    def export_onnx(
        self, path: str | os.PathLike[str], *, batch: int | str = "dynamic", external_data_threshold: int = 2_000_000_000,
        inline: bool = False, size: int | Sequence[int] | None = None, int64: bool = True,
    ) -> None:  # fmt: skip
        """Write the network as ONNX with integer operators only; see :func:`qflash.export_onnx`."""
        from .onnx_export import export_onnx

        threshold = external_data_threshold
        export_onnx(self, path, batch=batch, external_data_threshold=threshold, inline=inline, size=size, int64=int64)

    def export_tosa(
        self, path: str | os.PathLike[str], *, batch: int = 1, size: int | Sequence[int] | None = None, int16: bool = False
    ) -> dict[str, Mapping[str, int]]:
        """Write the network as a TOSA graph of the integer profile; see :func:`qflash.export_tosa`."""
        from .tosa_export import export_tosa

        return export_tosa(self, path, batch=batch, size=size, int16=int16)

    def export_c(self, folder: str | os.PathLike[str], *, batch: int = 1, size: int | Sequence[int] | None = None) -> None:
        """Write the network as a program in C; see :func:`qflash.export_c`."""
        from .c_export import export_c

        export_c(self, folder, batch=batch, size=size)

    def export_web(
        self, folder: str | os.PathLike[str], *, name: str | None = None, example: torch.Tensor | None = None,
        size: int | Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Write the network as a page and a package of npm; see :func:`qflash.export_web`."""
        from .web_export import export_web

        export_web(self, folder, name=name, example=example, size=size)

    def dequantize(self, output: Any) -> Any:
        """Return int32 logits or features as float32, or a list of them; of several outputs the dictionary of them."""
        if isinstance(output, dict):
            return {name: dequantized(x, self.scales[name]) for name, x in output.items()}
        return dequantized(output, self.output_scale)


def check_network(network: object, name: str = "network") -> None:
    """Require an integer network.

    Args:
        network: to look at.
        name: of the argument.

    Raises:
        TypeError: ``network`` is something else.
    """
    if not isinstance(network, IntegerNetwork):
        raise TypeError(f"{name} must be what quantize_model returns, got {type(network).__name__}")


def check_integer(network: IntegerNetwork) -> None:
    """Require a network without parts in floating point.

    Raises:
        TypeError: ``network`` is not an IntegerNetwork.
        ValueError: it has such parts; the message names them.
    """
    check_network(network)
    if parts := network.float_parts():
        raise ValueError(f"network must hold integers only, but keeps in floating point: {', '.join(parts)}")
