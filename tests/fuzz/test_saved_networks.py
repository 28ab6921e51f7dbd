"""Files of integer networks that somebody has changed: refused, unless they hold the same network.

Without the SHA-256 they are refused with a reason, or hold a network whose back ends agree.
"""

from __future__ import annotations

import contextlib
import copy
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import qflash
from fuzz import examples
from helpers import same_bits
from small_networks import draw, in_ours, made, rewrite  # noqa: F401 - a fixture

ODD = (
    0,
    -1,
    1,
    2,
    7,
    31,
    1 << 31,
    10**9,
    10**30,
    -(10**30),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "x",
    [],
    {},
    [[]],
)
"""What a number, a word or a list of a header is replaced by."""


def logits(path: Path, images: torch.Tensor) -> list[torch.Tensor] | str:
    """Load a file and run it on both back ends; returns logits, or the reason of a refusal."""
    try:
        network = qflash.load_model(path, verify=False)
    except ValueError as error:
        return str(error)
    outputs = []
    for backend in ("cpu", "reference"):
        network.backend = backend
        try:
            outputs.append(network(images))
        except (ValueError, TypeError) as error:
            outputs.append(str(error))
    assert type(outputs[0]) is type(outputs[1])
    return outputs[0] if isinstance(outputs[0], str) else outputs


def check(content: bytes, images: torch.Tensor, like: Any = None) -> None:
    """Look at a file; one that loads with its SHA-256 must be that of the network ``like``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.safetensors"
        path.write_bytes(content)
        found = logits(path, images)
        with contextlib.suppress(ValueError):
            loaded = qflash.load_model(path)
            assert like is None or same_network(loaded, like)
    if isinstance(found, str):
        assert found
    else:
        assert same_bits(*found)


def same_network(one: Any, other: Any) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def saved(network: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.safetensors"
        network.save(path)
        return path.read_bytes()


@examples(20)
@given(data=st.data(), kind=st.sampled_from(["class token", "swin"]))
def test_changed_bytes(made: Callable[[str], tuple[Any, Any]], data: st.DataObject, kind: str) -> None:  # noqa: F811
    model, network = made(kind)
    content = bytearray(saved(network))
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        if not content:
            break
        # most of a file is weights, and any of them will do
        last = data.draw(st.sampled_from([8, header, len(content)]), "part")
        place = data.draw(st.integers(0, min(last, len(content)) - 1), "place")
        how = data.draw(st.sampled_from(["change", "remove", "insert", "end"]), "how")
        byte = data.draw(st.integers(0, 255), "byte")
        if how == "change":
            content[place] = byte
        elif how == "remove":
            del content[place]
        elif how == "insert":
            content.insert(place, byte)
        else:
            content = content[: place + 1]
    check(bytes(content), draw(model, 1), network)


def places_of(x: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to everything in a JSON document."""
    inner = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return [path] * bool(path) + [place for key, each in inner for place in places_of(each, (*path, key))]


_KINDS = ["class token", "mean then norm", "query and key norms", "SwiGLU", "rotary", "swin"]


@examples(60)
@given(data=st.data(), kind=st.sampled_from(_KINDS))
def test_changed_headers(made: Callable[[str], tuple[Any, Any]], data: st.DataObject, kind: str) -> None:  # noqa: F811
    model, network = made(kind)

    def change(ours: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 2), "changes")):
            *way, last = data.draw(st.sampled_from(places_of(ours)), "place")
            x = ours
            for key in way:
                x = x[key]
            x[last] = copy.deepcopy(data.draw(st.sampled_from(ODD), "value"))

    check(rewrite(saved(network), in_ours(change)), draw(model, 1), network)


@examples(30)
@given(data=st.data(), kind=st.sampled_from(_KINDS))
def test_changed_tensors(made: Callable[[str], tuple[Any, Any]], data: st.DataObject, kind: str) -> None:  # noqa: F811
    model, network = made(kind)
    before = {name: x.clone() for name, x in network.state_dict().items()}
    try:
        for name in data.draw(st.lists(st.sampled_from(sorted(before)), min_size=1, max_size=3), "tensors"):
            x = network.state_dict()[name]
            ends = torch.iinfo(x.dtype)
            number = data.draw(st.sampled_from([ends.min, -1, 0, 1, ends.max, "random"]), "value")
            if number == "random":
                torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
                x.copy_(torch.randint(ends.min, ends.max + 1, x.shape, dtype=torch.int64))
            else:
                x.fill_(number)
        content = saved(network)
    finally:
        network.load_state_dict(before)
    check(content, draw(model, 1))
