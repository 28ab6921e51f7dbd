"""Keep an integer network in a file: :func:`save_model` and :func:`load_model`; and in a ``state_dict``.

Both hold the integers as tensors and one header: JSON with what kind of network it is, its shape and :data:`ENTRIES`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..specification.recipe import Recipe
from ..specification.reference import ARITHMETIC_VERSION
from ..validation import check_flags
from .float_parts import FloatNode
from .graph import IntegerNetwork, Node, check_network
from .inputs import check_sizes
from .modules import EXTRA_STATE, IntegerModule, shapes_only
from .operators import OPERATORS
from .quality import Quality
from .sizes import OtherSize, key_of

KEY = "qflash integer network"
"""Where the file's header has ours."""
VERSION = 2
"""Of the file's form."""
DIGEST = "sha256"
"""The entry with the digest of all else, which files have."""
_TYPES = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "F32": torch.float32}
"""What safetensors calls the types that networks have."""
_FLOAT32 = torch.finfo(torch.float32)
_OPERATORS = {**OPERATORS, FloatNode.__name__: FloatNode}

Form = tuple[object, tuple[int, ...]]
"""A tensor's type and shape."""


class HeaderEntry(NamedTuple):
    """Something that a network has beside its tensors and its shape.

    Attributes:
        write: returns it as JSON holds it; None leaves it out.
        read: checks what JSON holds and sets it in the network, of which kind and shape are made; ValueError if it is wrong.
        required: whether every header has it.
    """

    write: Callable[[IntegerNetwork], Any]
    read: Callable[[IntegerNetwork, Any], None]
    required: bool = True


def _parts(network: IntegerNetwork) -> dict[str, IntegerModule]:
    """Return the nodes of a network that have constants."""
    return {node.name: network.part(node.name) for node in network.nodes if network.part(node.name).constants}


def _constants_of(part: IntegerModule) -> dict[str, int]:
    return {constant: getattr(part, constant) for constant in part.constants}


def _write_constants(network: IntegerNetwork) -> dict[str, dict[str, int]]:
    return {name: _constants_of(part) for name, part in _parts(network).items()}


def _read_constants(network: IntegerNetwork, found: Any) -> None:
    parts = _parts(network)
    _check_names("constants", found, parts)
    for name, part in parts.items():
        _set_constants(name, part, found[name])


def _set_constants(name: str, part: IntegerModule, found: Any) -> None:
    _check_names(f"constants of {name}", found, part.constants)
    for constant in part.constants:
        value = found[constant]
        if type(value) is not int:
            raise ValueError(f"{name}.{constant} must be an integer, is {_shown(value)}")
        setattr(part, constant, value)


def _scale(name: str, value: Any) -> float:
    """Return a number that is the scale of integers: positive, and normal as a float32."""
    if type(value) not in (int, float) or not _FLOAT32.tiny <= value <= _FLOAT32.max:
        raise ValueError(f"{name} must be a number from {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}, is {_shown(value)}")
    return float(value)


def _read_scales(network: IntegerNetwork, found: Any) -> None:
    _check_names("scales", found, network.outputs)
    network.scales = {name: _scale(f"the scale of {name}", found[name]) for name in network.outputs}


def _read_units(network: IntegerNetwork, found: Any) -> None:
    if type(found) is not list or not 0 < len(found) <= len(network.nodes):
        raise ValueError(f"units must be a list of 1 to {len(network.nodes)} numbers, is {_shown(found)}")
    network.units = tuple(_scale("units", x) for x in found)


def _write_quality(network: IntegerNetwork) -> dict[str, Any] | None:
    return None if network.quality is None else _quality_entry(network.quality)


def _quality_entry(quality: Quality) -> dict[str, Any]:
    return {**dataclasses.asdict(quality), "float_parts": list(quality.float_parts)}


def _read_quality(network: IntegerNetwork, found: Any) -> None:
    network.quality = Quality.from_header(found)


_ABOUT = {"name": str, "labels": list, "images": dict}


def _check_about(found: Any) -> Any:
    _check_names("about", found, (), _ABOUT)
    for name, value in found.items():
        if type(value) is not _ABOUT[name] or (name == "labels" and not all(type(x) is str for x in value)):
            raise ValueError(f"{name} of about must be a {_ABOUT[name].__name__}, labels of strings, is {_shown(value)}")
    return found


def _read_about(network: IntegerNetwork, found: Any) -> None:
    network.about = _check_about(found)


def _write_sizes(network: IntegerNetwork) -> list[dict[str, Any]] | None:
    found = []
    for other in network.other_sizes():
        nodes = {}
        for name in sorted(other.names):
            part = other.part(name)
            nodes[name] = {"sizes": part.sizes, "constants": _constants_of(part), "tensors": sorted(part.tensors())}
        quality = {} if other.quality is None else {"quality": _quality_entry(other.quality)}
        found.append({"image": list(other.image), "nodes": nodes, **quality})
    return found or None


def _read_sizes(network: IntegerNetwork, found: Any) -> None:
    for other, entry in zip(network.other_sizes(), found, strict=True):
        for name in other.names:
            _set_constants(name, other.part(name), entry["nodes"][name]["constants"])
        other.quality = Quality.from_header(entry["quality"]) if "quality" in entry else None


def _kind_of_sizes(header: Mapping[str, Any]) -> Any:
    """Return what a header says of further sizes but for numbers, by which networks of one kind may differ."""
    return [
        (entry["image"], {name: (node["sizes"], node["tensors"]) for name, node in entry["nodes"].items()})
        for entry in header.get("sizes", [])
    ]


ENTRIES: dict[str, HeaderEntry] = {
    "constants": HeaderEntry(_write_constants, _read_constants),
    "scales": HeaderEntry(lambda network: network.scales, _read_scales),
    "units": HeaderEntry(lambda network: list(network.units), _read_units),
    "quality": HeaderEntry(_write_quality, _read_quality, required=False),
    "sizes": HeaderEntry(_write_sizes, _read_sizes, required=False),
    "about": HeaderEntry(lambda network: _check_about(network.about) or None, _read_about, required=False),
}
"""By their names in the header. A new one that older files lack is not required."""
_MADE_OF = ("version", "arithmetic_version", "image", "recipe", "nodes", "outputs")
"""Entries that say which network to make."""


def _shown(value: Any) -> str:
    """Return a value for a message, not longer than a line."""
    text = repr(value)
    return text if len(text) < 100 else f"{text[:90]}... ({len(text)} characters)"


def _check_names(what: str, found: Any, required: Any, optional: Any = ()) -> None:
    """Require a JSON object with these names and no others."""
    if type(found) is not dict:
        raise ValueError(f"{what} must be an object of JSON, is {_shown(found)}")
    odd = sorted((set(required) - found.keys()) | (found.keys() - {*required, *optional}))
    if odd:
        raise ValueError(f"{what} must fit the network: {_shown(odd)} are missing or not known")


def _strings(what: str, found: Any) -> None:
    """Require an object of JSON whose values are strings."""
    if type(found) is not dict or not all(type(x) is str for x in found.values()):
        raise ValueError(f"{what} must be an object of JSON with strings, is {_shown(found)}")


def _owners(network: IntegerNetwork) -> dict[str, tuple[str, IntegerModule, str]]:
    """Return by the names of tensors in files: the same in a ``state_dict``, the module, and the name there."""
    found: dict[str, tuple[str, IntegerModule, str]] = {}
    for node in network.nodes:
        part = network.part(node.name)
        found |= {f"{node.name}.{own}": (f"parts.{node.name}.{own}", part, own) for own in part.tensors()}
    for other in network.other_sizes():
        key = key_of(other.image[1:])
        for name in sorted(other.names):
            part, path = other.part(name), f"others.{key}.parts.{name}"
            # no node's name has an @
            found |= {f"{name}.{own}@{key}": (f"{path}.{own}", part, own) for own in part.tensors()}
    return found


def network_tensors(network: IntegerNetwork) -> dict[str, torch.Tensor]:
    """Return the integers of a network by the names of nodes and their tensors, and of further sizes what is their own."""
    return {name: part.tensors()[own] for name, (_, part, own) in _owners(network).items()}


def state_names(network: IntegerNetwork) -> dict[str, str]:
    """Return the names of :func:`network_tensors` by those of a ``state_dict``."""
    return {path: name for name, (path, _, _) in _owners(network).items()}


def network_header(network: IntegerNetwork) -> dict[str, Any]:
    """Return what a header says of a network, as JSON holds it."""
    entries = {name: entry.write(network) for name, entry in ENTRIES.items()}
    nodes = []
    for node in network.nodes:
        part = network.part(node.name)
        nodes.append({"name": node.name, "operator": type(part).__name__, "inputs": list(node.inputs), "sizes": part.sizes})
    return {
        "version": VERSION,
        "arithmetic_version": ARITHMETIC_VERSION,
        "image": list(network.image),
        "recipe": network.recipe.key,
        "nodes": nodes,
        "outputs": network.outputs,
        **{name: value for name, value in entries.items() if value is not None},
    }


def _network(header: Mapping[str, Any], most: int) -> IntegerNetwork:
    """Return the network of a header's nodes, all zeros.

    Args:
        header: parsed.
        most: nodes that there may be.
    """
    nodes, modules = [], {}
    recipe = _recipe(header["recipe"])
    if type(header["nodes"]) is not list or not 0 < len(header["nodes"]) <= most:
        raise ValueError(f"nodes must be a list of 1 to {most}, is {_shown(header['nodes'])}")
    for entry in header["nodes"]:
        _check_names("a node", entry, ("name", "operator", "inputs", "sizes"))
        name, operator, inputs, sizes = (entry[each] for each in ("name", "operator", "inputs", "sizes"))
        if type(name) is not str or type(operator) is not str or operator not in _OPERATORS or type(sizes) is not dict:
            raise ValueError(
                f"a node must have a name, sizes and one of the operators {sorted(_OPERATORS)}, is {_shown(entry)}"
            )
        if type(inputs) is not list or not inputs or not all(type(each) is str for each in inputs):
            raise ValueError(f"inputs of {name} must be names, are {_shown(inputs)}")
        modules[name] = _module(name, operator, sizes, recipe)
        nodes.append(Node(name, tuple(inputs)))
    _strings("outputs", header["outputs"])
    if type(header["image"]) is not list:
        raise ValueError(f"image must be a list, is {_shown(header['image'])}")
    try:
        network = IntegerNetwork(nodes, modules, header["image"], recipe, header["outputs"])
    except KeyError as error:
        raise ValueError(f"nodes must have other names, {error} is taken") from error
    _add_sizes(network, header.get("sizes", []), most)
    return network


def _module(name: str, operator: str, sizes: Mapping[str, Any], recipe: Recipe) -> IntegerModule:
    """Return an empty module of a node."""
    try:
        module = _OPERATORS[operator](**sizes)
    except TypeError as error:
        raise ValueError(f"sizes of {name} do not fit {operator}: {error}") from error
    except (ValueError, RecursionError, OverflowError, RuntimeError) as error:  # sizes beyond 64 bits are the last
        raise ValueError(f"{name}: {error}") from error
    own = getattr(module, "recipe", recipe.key)
    if own != recipe.key:
        raise ValueError(f"recipe of {name} must be the network's, is {_shown(own)}")
    return module


def _add_sizes(network: IntegerNetwork, entries: Any, most: int) -> None:
    """Add what a header says of further sizes to a network.

    Args:
        network: of the first size.
        entries: of the header.
        most: nodes that all of them may have.
    """
    if type(entries) is not list:
        raise ValueError(f"sizes must be a list, is {_shown(entries)}")
    device = next(network.buffers()).device
    for entry in entries:
        _check_names("a size", entry, ("image", "nodes"), ("quality",))
        image, nodes = entry["image"], entry["nodes"]
        if type(image) is not list or len(image) != 3 or len(network.image) != 3 or image[0] != network.image[0]:
            raise ValueError(f"image of a size must have the network's channels, height and width, is {_shown(image)}")
        check_sizes(image)
        if tuple(image[1:]) in network.image_sizes:
            raise ValueError(f"sizes must be different, {_shown(image)} comes twice")
        _check_names("nodes of a size", nodes, (), {node.name for node in network.nodes})
        most -= 1 + len(nodes)
        if most < 0:
            raise ValueError("sizes must not have more nodes than tensors")
        modules = {name: _own_module(network, name, found) for name, found in nodes.items()}
        other = OtherSize(image, modules)
        for module in modules.values():
            for own, x in module.tensors().items():
                module._buffers[own] = torch.zeros(x.shape, dtype=x.dtype, device=device)
        network.add_size(other)


def _own_module(network: IntegerNetwork, name: str, entry: Any) -> IntegerModule:
    """Return the module of a node at another size, without numbers."""
    _check_names(f"{name} of a size", entry, ("sizes", "constants", "tensors"))
    shared = network.part(name)
    if type(entry["sizes"]) is not dict or type(entry["tensors"]) is not list:
        raise ValueError(f"{name} of a size must have sizes and tensors, is {_shown(entry)}")
    with shapes_only():
        part = _module(name, type(shared).__name__, entry["sizes"], network.recipe)
    tensors, known = part.tensors(), shared.tensors()
    if not all(type(own) is str and own in tensors for own in entry["tensors"]):
        raise ValueError(f"tensors of {name} at a size must be of {sorted(tensors)}, are {_shown(entry['tensors'])}")
    for own in tensors.keys() - {*entry["tensors"]}:
        if own not in known or (known[own].shape, known[own].dtype) != (tensors[own].shape, tensors[own].dtype):
            raise ValueError(f"{name}.{own} must be of that size alone, since its shape differs")
        part._non_persistent_buffers_set.add(own)
    return part


def _recipe(key: Any) -> Recipe:
    try:
        recipe = Recipe.from_key(key) if type(key) is str else None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"recipe must be the key of a qflash.Recipe, is {_shown(key)}: {error}") from error
    if recipe is None or recipe.key != key:
        raise ValueError(f"recipe must be the key of a qflash.Recipe, which names all of its fields, is {_shown(key)}")
    return recipe


def _digest(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of a header but for its own entry, and of tensors; docs/integer_network.md says of which bytes."""
    rest = {name: value for name, value in header.items() if name != DIGEST}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(json.dumps([name, str(x.dtype).removeprefix("torch."), list(x.shape)]).encode())
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _parsed(text: str | bytes) -> Any:
    """Return what JSON says, which has no NaN and no infinity.

    Raises:
        ValueError: it is no JSON.
    """

    def refuse(number: str) -> None:
        raise ValueError(f"JSON has no {number}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error


def make_network(header: Any, forms: Mapping[str, Form]) -> IntegerNetwork:
    """Make the network of a header, all zeros, if it is one that such tensors fill. Before that nothing is allocated.

    Args:
        header: parsed.
        forms: of all tensors, by their names.
    """
    if type(header) is not dict or type(header.get("version")) is not int:
        raise ValueError(f"its header must be an object of JSON with a version, is {_shown(header)}")
    # files from before the entry are of the first
    arithmetic = header.get("arithmetic_version", 1)
    if type(arithmetic) is not int or arithmetic != ARITHMETIC_VERSION:
        raise ValueError(
            f"it is for arithmetic version {_shown(arithmetic)}, this QFlash computes version {ARITHMETIC_VERSION}, which "
            "gives other integers; quantise the float model again, with qflash.quantize_model and calibration images"
        )
    if header["version"] != VERSION:
        raise ValueError(f"it is of version {header['version']}, this QFlash reads {VERSION}; quantise the float model again")
    required = [name for name, entry in ENTRIES.items() if entry.required]
    _check_names("its header", header, (*_MADE_OF, *required), (*ENTRIES, DIGEST))
    # most nodes have several tensors; so a header cannot ask for nodes without end
    most = 2 * len(forms) + 8
    with shapes_only():
        wanted = {name: (x.dtype, tuple(x.shape)) for name, x in network_tensors(_network(header, most)).items()}
    if odd := sorted(wanted.keys() ^ forms.keys()):
        raise ValueError(f"tensors {odd[:3]} are missing or not known")
    for name, form in forms.items():
        if form != wanted[name]:
            raise ValueError(f"{name} must be {wanted[name][0]} {wanted[name][1]}, is {form[0]} {form[1]}")
    return _network(header, most)


def fill_network(network: IntegerNetwork, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> IntegerNetwork:
    """Fill in a network that :func:`make_network` has made for a header, and look whether its integers keep their bounds."""
    for name, x in network_tensors(network).items():
        x.copy_(tensors[name])
    _read_entries(network, header)
    network.check_values()
    return network


def _read_entries(network: IntegerNetwork, header: Mapping[str, Any]) -> None:
    for name, entry in ENTRIES.items():
        if name in header:
            entry.read(network, header[name])


def network_from_header(header: Any, tensors: Mapping[str, torch.Tensor]) -> IntegerNetwork:
    """Return the network that :func:`network_header` and its tensors describe.

    Raises:
        ValueError: the header has an entry that is wrong, is missing or not known; tensors are missing, not known, or do not
            fit it; or integers do not keep their bounds (:meth:`.graph.IntegerNetwork.check_values`).
    """
    return fill_network(make_network(header, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}), header, tensors)


def save_model(network: IntegerNetwork, path: str | os.PathLike[str]) -> None:
    """Write an integer network to a safetensors file: integers, and a header with its shape, shifts and a SHA-256 of all.

    Nodes that are kept in floating point are written with their float32 weights.

    An existing file is replaced only after the new one is complete.

    Raises:
        TypeError: ``network`` is not an integer network.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save

    from ..paths import write_whole

    check_network(network)
    tensors = {name: x.detach().cpu().contiguous() for name, x in network_tensors(network).items()}
    # as it will be read again
    header = _parsed(json.dumps(network_header(network)))
    header[DIGEST] = _digest(header, tensors)
    write_whole(path, save(tensors, metadata={KEY: json.dumps(header)}))


@torch.inference_mode(False)  # what is made is to be written to, in any mode
def load_model(path: str | os.PathLike[str], device: torch.device | str = "cpu", *, verify: bool = True) -> IntegerNetwork:
    """Read an integer network that :func:`save_model` wrote. Nothing in the file is executed.

    Types and shapes of all tensors are compared with the header before memory is allocated for them.

    Args:
        path: of the file.
        device: where it is put.
        verify: compare the SHA-256 in the header with tensors and header. False skips only this check.

    Raises:
        TypeError: ``verify`` is not True or False.
        ValueError: it is not such a file, is of another version, truncated or damaged, or its tensors do not fit its
            header.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    check_flags(verify=verify)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no integer network at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise ValueError(f"it is no integer network of QFlash, its header has no {KEY!r}")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no dictionary
            header = _parsed(metadata[KEY])
            forms = {name: _form(x.get_dtype(), x.get_shape()) for name, x in slices.items()}
            network = make_network(header, forms)
            tensors = {name: file.get_tensor(name) for name in slices}
            if verify:
                _check_digest(header, tensors)
            fill_network(network, header, tensors)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no whole integer network: {error}") from error
    return network.to(device).eval()


def _form(kind: str, shape: list[int]) -> Form:
    return _TYPES.get(kind, kind), tuple(shape)


def _check_digest(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    if DIGEST not in header:
        raise ValueError("its header has no SHA-256; verify=False reads it without this check")
    if header[DIGEST] != _digest(header, tensors):
        raise ValueError("it is damaged: its SHA-256 is another than the one in its header")


def header_tensor(network: IntegerNetwork) -> torch.Tensor:
    """Return a network's header as uint8, which every format of a ``state_dict`` can hold."""
    return torch.frombuffer(bytearray(json.dumps(network_header(network)).encode()), dtype=torch.uint8)


def load_state(network: IntegerNetwork, state: Mapping[str, Any], assign: bool) -> None:
    """Fill in a network from a ``state_dict`` of one of the same kind and shape, or leave it as it is.

    Args:
        network: to change.
        state: its tensors, and :func:`header_tensor` as PyTorch names it.
        assign: put the tensors themselves into it instead of their numbers.

    Raises:
        ValueError: there is no header, it describes another network, or is wrong as one of a file can be.
    """
    text = state.get(EXTRA_STATE)
    if text is None:
        raise ValueError(f"the state_dict lacks {EXTRA_STATE!r} with its shifts, output scale, units and recipe")
    if not isinstance(text, torch.Tensor) or text.dtype != torch.uint8 or text.dim() != 1 or text.is_meta:
        raise ValueError(f"{EXTRA_STATE!r} in the state_dict must be a uint8 tensor of one dimension, is {_shown(text)}")
    tensors = {name: x for name, x in state.items() if name != EXTRA_STATE}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.is_meta:
            raise ValueError(f"{name} in the state_dict must be a tensor with numbers, is {_shown(x)}")
    header = _parsed(bytes(text.cpu().numpy()))
    other = network_from_header(header, tensors)
    own, given = network_header(network), network_header(other)
    if any(own[name] != given[name] for name in _MADE_OF) or _kind_of_sizes(own) != _kind_of_sizes(given):
        raise ValueError("the state_dict is of a network with other nodes")
    with torch.no_grad():
        for name, (_, part, buffer) in _owners(network).items():
            if assign:
                setattr(part, buffer, tensors[name])
            else:
                part.tensors()[buffer].copy_(tensors[name])
    network.link()
    _read_entries(network, header)
