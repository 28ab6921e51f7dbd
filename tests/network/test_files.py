"""Files and ``state_dict`` of integer networks: damaged, hostile, half written, and of other networks."""

from __future__ import annotations

import copy
import errno
import functools
import io
import json
import os
import pickle
import random
import re
import signal
import stat
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qflash
from qflash import paths
from qflash.network import storage
from small_networks import KINDS, build, draw, in_ours, memory_of_refusals, note_devices, rewrite

Made = Callable[[str], tuple[Any, Any]]
EXTRA = "_extra_state"


def same(one: Any, other: Any) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def tiny() -> Any:
    """Return a network whose file is small enough for every byte of it to be tried."""
    model = build("vit", img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, mlp_ratio=1, num_classes=2)
    return qflash.quantize_model(model, [draw(model, 16)], progress=False)


@pytest.fixture(scope="module")
def network() -> Any:
    return tiny()


@pytest.fixture
def path(network: Any, tmp_path: Path) -> Path:
    path = tmp_path / "network.safetensors"
    network.save(path)
    return path


def header_length(content: bytes) -> int:
    return 8 + int(struct.unpack("<Q", content[:8])[0])


# --- damage ---------------------------------------------------------------------------------------------------


def loads_equal_or_not_at_all(path: Path, content: bytes, network: Any) -> bool:
    """Tell whether a file loads, and require that it then holds the network."""
    path.write_bytes(content)
    try:
        loaded = qflash.load_model(path)
    except ValueError:
        return False
    assert same(loaded, network)
    return True


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_of_a_tensor_is_refused(network: Any, path: Path) -> None:
    content = path.read_bytes()
    bits = range(8 * header_length(content), 8 * len(content))
    for bit in random.Random(0).sample(bits, 100):
        assert not loads_equal_or_not_at_all(path, flipped(content, bit), network), bit


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow, id="every byte")])
def test_a_flipped_bit_of_the_header_is_refused_or_changes_nothing(step: int, network: Any, path: Path) -> None:
    content = path.read_bytes()
    end = header_length(content)
    # a bit of every step-th byte, all of those of the last, and of those before tensors' names begin
    bits = {8 * byte + byte % 8 for byte in range(0, end, step)} | set(range(96)) | set(range(8 * (end - 8), 8 * end))
    assert sum(loads_equal_or_not_at_all(path, flipped(content, bit), network) for bit in sorted(bits)) < 20


def test_the_digest_is_as_the_document_says(network: Any, path: Path) -> None:
    """Computed here from the document alone, with NumPy's safetensors."""
    import hashlib

    from safetensors.numpy import load

    content = path.read_bytes()
    ours = json.loads(json.loads(content[8 : header_length(content)])["__metadata__"]["qflash integer network"])
    wanted = ours.pop("sha256")
    digest = hashlib.sha256(json.dumps(ours, sort_keys=True).encode())
    for name, x in sorted(load(content).items()):
        digest.update(json.dumps([name, x.dtype.name, list(x.shape)]).encode())
        digest.update(x.tobytes())
    assert digest.hexdigest() == wanted


def test_a_file_without_a_digest_is_refused_with_advice(network: Any, path: Path) -> None:
    path.write_bytes(rewrite(path.read_bytes(), in_ours(lambda ours: ours.pop("sha256"))))
    with pytest.raises(ValueError, match=r"has no SHA-256; verify=False reads it without"):
        qflash.load_model(path)
    loaded = qflash.load_model(path, verify=False)
    assert same(loaded, network)
    loaded.save(path)
    assert same(qflash.load_model(path), network)
    with pytest.raises(TypeError, match="verify must be True or False, got 1"):
        qflash.load_model(path, verify=1)  # type: ignore[arg-type]


# --- odd headers ----------------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1e300, 1e-300, 10**400, -(10**400), True, None, "1", [], [1.0], {}, float("nan"), float("inf"))
SIZES = (0, -1, 1.0, 1 << 40, 10**400, True, None, "8", [], [8], [8, 8, 8], {}, float("nan"))
RECIPES = ("{}", "", "default", "[]", "{", "[" * 100000, None, 1, {}, '{"probability_bits": 8}', '{"x": 1}', qflash.PAPER.key)
NAMES = (None, 1, [], {}, "", "images", "other", "a b", ".", "x" * 10000)
LATER = [{"name": "more", "operator": "Widen", "inputs": ["head"], "sizes": {"token": None}}]
FIELDS: dict[str, tuple[Any, ...]] = {
    "version": (0, 1, 3, True, 2.0, "2", None, [], {}),
    "arithmetic_version": (0, 1, 2, True, "3", 3.0, None, [], {}, 10**400),
    "image": (8, [3, 8], [3, 8, 8, 8], [3, 8, 8.0], [3, 8, True], [3, 0, 8], [3, -8, 8], [3, 7, 8], [1, 8, 8], "388", {}, None,
              [3, 10**400, 8], [3, [8], 8], [3, 1 << 13, 1 << 14], [3, 16, 16]),
    "recipe": RECIPES,
    "outputs": (None, [], {}, 1, "x", {"output": None}, {"output": "images"}, {"output": "other"}, {"output": 1},
                {"a": "head", "b": "other"}),
    "scales": (None, [], {}, 1, "x", {"other": 1.0}, {"output": 1.0, "other": 1.0}),
    "scales.output": NUMBERS,
    "units": (*(x for x in NUMBERS if x != [1.0]), [], [1.0] * 100, [1e300], [True], [[1.0]], [None], [float("nan")]),
    "constants": (None, [], {}, 1, "x"),
    "constants.head": (None, [], {}, 1, {"left": True}, {"left": 1.0}, {"left": "1"}, {"left": -1}, {"left": 31},
                       {"left": 10**400}, {"left": 1, "right": 1}),
    "constants.norm": ({"epsilon": -1, "shift": 1}, {"epsilon": (1 << 46) + 1, "shift": 1}, {"epsilon": 0, "shift": 30},
                       {"shift": 1}),
    "quality": (None, 1, [], {}, "x"),
    "unknown": (1, None),
    "nodes": (None, [], {}, 1, "x", [None], [[]], [{}], LATER),
    **{f"nodes.{number}": (None, [], {}, 1, "x", LATER[0]) for number in (0, 3, -1)},
    **{f"nodes.{number}.name": NAMES for number in (0, 3, -1)},
    **{f"nodes.{number}.operator": (None, 1, [], {}, "", "Other", "Join", "Widen", "Mean") for number in (0, 2, 3)},
    **{f"nodes.{number}.inputs": (None, 1, "images", {}, [], [1], [None], ["other"], ["head"], ["images"] * 4)
       for number in (0, 1, 3, -1)},
    **{f"nodes.{number}.sizes": (None, 1, [], {}, "x", {"x": 1}) for number in (0, 3, -1)},
    **{f"nodes.{number}.unknown": (1, None) for number in (0, -1)},
    # of the patch embedding, a normalisation, attention, and the head
    **{f"nodes.0.sizes.{name}": tuple(x for x in SIZES if (name, x) != ("prefix_tokens", 1) or x is True)
       for name in ("image_channels", "outputs", "positions", "prefix_tokens")},
    "nodes.0.sizes.patch_size": (4, [4], [4, 4, 4], [4, 0], [3, 4], [4, True], "44", {}, None, [8, 8]),
    "nodes.1.sizes.channels": SIZES,
    **{f"nodes.1.sizes.{name}": (*(x for x in SIZES if x is not None and x != []), [1, 2, 3], [10**6, 10**6], [1, 1])
       for name in ("gather", "part")},
    "nodes.1.sizes.single": (0, 1, None, "x", [], True),
    "nodes.1.sizes.dtype": (None, 1, "int16", "int32", "float32", "int4", [], {}),
    **{f"nodes.3.sizes.{name}": SIZES for name in ("heads", "head_dim")},
    "nodes.3.sizes.softmax_scale": (*NUMBERS, 2.0**61, 2.0**-61),
    "nodes.3.sizes.recipe": RECIPES,
    "nodes.3.sizes.bias": (1, True, "x", {}, [1], [1, 1, 1], [1, 1, 5, 5], [1, 1, 5, 10**9], [10**400] * 4),
    **{f"nodes.3.sizes.{name}": tuple(x for x in SIZES if type(x) is not int or x) for name in ("tokens", "queries")},
    **{f"nodes.-1.sizes.{name}": SIZES for name in ("inputs", "outputs")},
    "nodes.-1.sizes.tokens": tuple(x for x in SIZES if type(x) is not int or x),
    "nodes.-1.sizes.dtype": (None, 1, "int8", "float32", "int4", [], {}),
}  # fmt: skip
"""Entries of a header and what must not stand there."""


def place_of(ours: dict[str, Any], field: str) -> tuple[Any, Any]:
    """Return what holds an entry of a header, and the entry's name or number there."""
    *way, last = (int(key) if key.lstrip("-").isdigit() else key for key in field.split("."))
    place: Any = ours
    for key in way:
        place = place[key]
    return place, last


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_in_a_header_is_refused(path: Path, field: str) -> None:
    content = path.read_bytes()
    for value in FIELDS[field]:

        def change(ours: dict[str, Any], value: Any = value) -> None:
            place, last = place_of(ours, field)
            place[last] = value

        path.write_bytes(rewrite(content, in_ours(change)))
        with pytest.raises(ValueError, match="holds no whole integer network"):
            print(field, str(value)[:100], qflash.load_model(path, verify=False))


def entries(x: Any, way: str = "") -> list[str]:
    """Return the ways to all entries of objects in a header."""
    if isinstance(x, list):
        return [each for number, inner in enumerate(x) for each in entries(inner, f"{way}{number}.")]
    if not isinstance(x, dict):
        return []
    return [each for name, inner in x.items() for each in (f"{way}{name}", *entries(inner, f"{way}{name}."))]


def test_every_entry_of_a_header_is_needed(path: Path) -> None:
    content = path.read_bytes()
    ours = json.loads(json.loads(content[8 : header_length(content)])["__metadata__"][storage.KEY])
    # names with dots are nodes of "constants"
    found = [name for name in entries({**ours, "constants": {}}) if not name.startswith("quality.")]
    assert len(found) > 80
    for name in found:

        def change(ours: dict[str, Any], name: str = name) -> None:
            place, last = place_of(ours, name)
            del place[last]

        path.write_bytes(rewrite(content, in_ours(change)))
        with pytest.raises(ValueError, match="holds no whole integer network"):
            qflash.load_model(path)
        if ".sizes." not in name and name not in ("quality", "sha256"):
            # sizes may have defaults
            with pytest.raises(ValueError, match="holds no whole integer network"):
                qflash.load_model(path, verify=False)
    for node in ours["constants"]:
        path.write_bytes(rewrite(content, in_ours(lambda ours, node=node: ours["constants"].pop(node))))
        with pytest.raises(ValueError, match="holds no whole integer network"):
            qflash.load_model(path, verify=False)


# --- hostile headers ------------------------------------------------------------------------------------------


def linear_node(name: str, inputs: int, outputs: int, *taken: str, **sizes: Any) -> dict[str, Any]:
    sizes = {"inputs": inputs, "outputs": outputs, "dtype": "int16", **sizes}
    return {"name": name, "operator": "Linear", "inputs": list(taken), "sizes": sizes}


EMBED = {
    "name": "embed", "operator": "PatchEmbedding", "inputs": ["images"],
    "sizes": {"image_channels": 3, "patch_size": [4, 4], "outputs": 8, "positions": 0, "prefix_tokens": 0},
}  # fmt: skip
CORE = {"heads": 1, "head_dim": 8, "softmax_scale": 0.3, "recipe": qflash.DEFAULT.key, "bias": None, "tokens": 0, "queries": 0}
HOSTILE: dict[str, dict[str, Any]] = {
    "outputs": {"nodes": [EMBED, linear_node("x", 1 << 12, 1 << 24, "embed")]},
    "tokens": {"nodes": [EMBED, linear_node("x", 8, 8, "embed", tokens=1 << 24)] + [
        linear_node(f"x{i}", 8, 8, "embed", tokens=1 << 24) for i in range(100)]},
    "positions": {"nodes": [EMBED | {"sizes": EMBED["sizes"] | {"positions": 1 << 24, "outputs": 4096}}]},
    "image": {"nodes": [EMBED], "image": [3, 8192, 8192]},
    "channels": {"nodes": [EMBED], "image": [1 << 24, 8192, 8192]},
    "bias": {"nodes": [EMBED, {"name": "core", "operator": "Attention", "inputs": ["embed"],
                               "sizes": CORE | {"bias": [1 << 10, 1 << 4, 1 << 10, 1 << 10]}}]},
    "bias of more than fits": {"nodes": [EMBED, {"name": "core", "operator": "Attention", "inputs": ["embed"],
                                                 "sizes": CORE | {"bias": [1 << 24] * 4}}]},
    "queries": {"nodes": [EMBED, {"name": "core", "operator": "Attention", "inputs": ["embed"],
                                  "sizes": CORE | {"queries": 1 << 24, "head_dim": 512}}]},
    "gather": {"nodes": [EMBED, {"name": "norm", "operator": "LayerNorm", "inputs": ["embed"],
                                 "sizes": {"channels": 8, "dtype": "int8", "gather": [1 << 24, 1 << 6]}}]},
    "nodes without end": {"nodes": [{"name": f"n{i}", "operator": "Widen", "inputs": ["images"], "sizes": {"token": None}}
                                    for i in range(100_000)]},
}  # fmt: skip


def test_a_hostile_header_takes_no_memory(tmp_path: Path) -> None:
    files = []
    for index, changes in enumerate(HOSTILE.values()):
        path = tmp_path / f"{index}.safetensors"
        nodes = [node["name"] for node in changes["nodes"]]
        header = {
            "version": storage.VERSION, "arithmetic_version": storage.ARITHMETIC_VERSION, "image": [3, 8, 8],
            "recipe": qflash.DEFAULT.key, "outputs": {"output": nodes[-1]}, "scales": {"output": 1.0}, "units": [1.0],
            "constants": {}, **changes,
        }  # fmt: skip
        save_file({f"x{i}": torch.zeros(1, dtype=torch.int8) for i in range(130)}, path, {storage.KEY: json.dumps(header)})
        files.append(str(path))
    assert memory_of_refusals(files) < 60_000


def test_shapes_are_compared_before_memory_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = note_devices(monkeypatch)
    content = path.read_bytes()
    for number, field, value in ((0, "outputs", 16), (0, "prefix_tokens", 2), (1, "channels", 16), (-1, "outputs", 3)):

        def change(ours: dict[str, Any], number: int = number, field: str = field, value: int = value) -> None:
            ours["nodes"][number]["sizes"][field] = value

        path.write_bytes(rewrite(content, in_ours(change)))
        with pytest.raises(ValueError, match=r"must be torch\.int"):
            qflash.load_model(path, verify=False)
    assert set(places) == {"meta"}


# --- writing --------------------------------------------------------------------------------------------------


def save(network: Any, path: Path) -> None:
    network.save(path)


def export(network: Any, path: Path) -> None:
    pytest.importorskip("onnx")
    network.export_onnx(path)


def export_in_two(network: Any, path: Path) -> None:
    pytest.importorskip("onnx")
    network.export_onnx(path, external_data_threshold=100)


WRITERS = pytest.mark.parametrize("write", [save, export, export_in_two])


@WRITERS
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_mode_that_the_umask_leaves(network: Any, tmp_path: Path, write: Any, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(network, tmp_path / "file")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}


@WRITERS
def test_a_replaced_file_keeps_its_mode_and_its_links(network: Any, tmp_path: Path, write: Any) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "file", tmp_path / "link"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    write(network, link)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640 and real.read_bytes() != b"old"


@pytest.fixture(params=["unnamed", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with files that have no name before they are whole, and as on systems that have none of these."""
    if request.param == "named":
        monkeypatch.setattr(paths, "_open_unnamed", lambda folder: None)
    return str(request.param)


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """Return a function after which files of this process cannot be longer; where there is no such limit it skips."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@WRITERS
def test_a_full_disk_leaves_the_old_file(
    network: Any, tmp_path: Path, write: Any, temporary: str, small_disk: Callable[[int], None]
) -> None:
    path = tmp_path / "file"
    other = copy.deepcopy(network)
    other.part("head").bias += 1
    write(other, path)
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    small_disk(1000)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
        write(network, path)
    small_disk(-1)
    assert caught.value.errno == errno.EFBIG
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
    path.unlink()
    write(network, path)


@WRITERS
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_step_that_fails_leaves_nothing(
    network: Any, tmp_path: Path, write: Any, step: str, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    with monkeypatch.context() as patched:
        patched.setattr(*(os, "fsync") if step == "fsync" else (Path, "replace"), fail)
        with pytest.raises(OSError, match="No space left on device"):
            write(network, path)
    assert list(tmp_path.iterdir()) == []


@WRITERS
def test_places_that_cannot_be_written_to(network: Any, tmp_path: Path, write: Any) -> None:
    with pytest.raises(FileNotFoundError):
        write(network, tmp_path / "missing" / "file")
    with pytest.raises(IsADirectoryError):
        write(network, tmp_path)
    (tmp_path / "plain").touch()
    with pytest.raises(NotADirectoryError):
        write(network, tmp_path / "plain" / "file")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


KILLED = """
import sys, time, qflash
from qflash import paths
from qflash.network.modules import Linear
network = qflash.load_model(sys.argv[1])
real = paths.os.fsync
def slow(descriptor):
    print("written", flush=True)
    time.sleep(60)
paths.os.fsync = slow
network.save(sys.argv[2])
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files have names from the start")
def test_a_save_that_is_killed_leaves_nothing(network: Any, path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target = folder / "network.safetensors"
    target.write_bytes(b"old")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(target)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.kill()
    child.wait()
    assert list(folder.iterdir()) == [target] and target.read_bytes() == b"old"


def test_a_pipe_gets_the_file_itself(network: Any, path: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    network.save(pipe)
    assert child.communicate()[0] == path.read_bytes() and stat.S_ISFIFO(pipe.stat().st_mode)


# --- state_dict -----------------------------------------------------------------------------------------------


@functools.cache
def quantised_once(model: Any, seed: int) -> Any:
    return qflash.quantize_model(model, [draw(model, 16, seed)], progress=False)


def quantised(model: Any, seed: int, **options: Any) -> Any:
    if not options:
        return copy.deepcopy(quantised_once(model, seed))
    return qflash.quantize_model(model, [draw(model, 16, seed)], progress=False, **options)


@pytest.fixture(scope="module", params=["class token", "query and key norms", "mean then norm", "swin"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A model and two integer networks of it, calibrated on different images."""
    family, options = KINDS[request.param]
    model = build(family, **options)
    return model, quantised(model, 3), quantised(model, 4)


def travelled(kind: str, state: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    if kind == "torch.save":
        content = io.BytesIO()
        torch.save(state, content)
        content.seek(0)
        return dict(torch.load(content, weights_only=True))
    if kind == "safetensors":
        save_file(state, tmp_path / "state.safetensors")
        return load_file(tmp_path / "state.safetensors")
    return state


@pytest.mark.parametrize("kind", ["as it is", "torch.save", "safetensors", "assign", "not strict", "inside another module"])
def test_a_state_dict_makes_the_network(pair: tuple[Any, Any, Any], kind: str, tmp_path: Path) -> None:
    model, source, target = pair
    target, images = copy.deepcopy(target), draw(model, 3, 9)
    assert not torch.equal(target(images), source(images))
    if kind == "inside another module":
        outer = torch.nn.Sequential(torch.nn.Identity(), target)
        found = outer.load_state_dict(torch.nn.Sequential(torch.nn.Identity(), source).state_dict())
    else:
        state = travelled(kind, source.state_dict(), tmp_path)
        found = target.load_state_dict(state, strict=kind != "not strict", assign=kind == "assign")
    assert found.missing_keys == found.unexpected_keys == []
    assert torch.equal(target(images), source(images)) and same(target, source)
    assert (target.output_scale, target.units) == (source.output_scale, source.units)
    # what was loaded is a copy but for assign
    shared = next(target.buffers()).data_ptr() == next(source.buffers()).data_ptr()
    assert shared == (kind == "assign")


def refused(target: Any, state: dict[str, Any], message: str, strict: bool = True) -> None:
    before = copy.deepcopy(target)
    with pytest.raises(RuntimeError, match=message) as caught:
        target.load_state_dict(state, strict=strict)
    assert "network.save and qflash.load_model" in str(caught.value)
    assert same(target, before) and (target.output_scale, target.units) == (before.output_scale, before.units)


def header_changed(state: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    header = json.loads(bytes(state[EXTRA].tolist()))
    change(header)
    return state | {EXTRA: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_that_does_not_fit_is_refused(made: Made, strict: bool) -> None:
    model, target = made("class token")
    target = copy.deepcopy(target)
    state = dict(quantised(model, 4).state_dict())
    without = {name: x for name, x in state.items() if name != EXTRA}
    refused(target, without, "lacks '_extra_state' with its shifts, output scale, units and recipe", strict)
    bias, multiplier = "parts.head.bias", "parts.head.multiplier"
    refused(target, {bias: state[bias]}, "lacks '_extra_state'", strict)
    part = {name: x for name, x in state.items() if name != bias}
    refused(target, part, r"tensors \['head.bias'\] are missing", strict)
    for name, x, message in (
        (EXTRA, state[EXTRA].to(torch.int8), "'_extra_state' in the state_dict must be a uint8 tensor"),
        (EXTRA, state[EXTRA][:-1], "IntegerNetwork stays as it is"),
        (EXTRA, "{}", "'_extra_state' in the state_dict must be a uint8 tensor"),
        (bias, state[bias].float(), r"head\.bias must be torch\.int32 \(10,\), is torch\.float32"),
        (bias, state[bias].long(), r"head\.bias must be torch\.int32 \(10,\), is torch\.int64"),
        (bias, state[bias][:5], r"head\.bias must be torch\.int32 \(10,\), is torch\.int32 \(5,\)"),
        (bias, [1, 2], "head.bias in the state_dict must be a tensor"),
        (bias, state[bias].to("meta"), "head.bias in the state_dict must be a tensor with numbers"),
        (multiplier, torch.full_like(state[multiplier], -1), "head: multiplier must be from 0"),
    ):
        refused(target, state | {name: x}, message, strict)

    def core(header: dict[str, Any]) -> dict[str, Any]:
        return next(node for node in header["nodes"] if node["operator"] == "Attention")["sizes"]  # type: ignore[no-any-return]

    def rename(header: dict[str, Any]) -> None:
        # a network that is right by itself
        for node in header["nodes"]:
            if node["operator"] == "Attention":
                node["sizes"]["recipe"] = qflash.PAPER.key
        header["recipe"] = qflash.PAPER.key

    other = "the state_dict is of a network with other nodes"
    for change, message in (
        (lambda header: header["constants"]["head"].update(left=31), "head: left must be from 0 to 30, got 31"),
        (lambda header: header.update(arithmetic_version=2), "arithmetic version 2, .*quantise the float model again"),
        (lambda header: header["scales"].update(output=float("nan")), "JSON has no NaN"),
        (lambda header: header["scales"].update(output=1e300), "the scale of output must be a number"),
        (lambda header: core(header).update(softmax_scale=0.5), other),
        (rename, other),
        (lambda header: header.update(outputs={"classes": "head"}, scales={"classes": 1.0}), other),
        (lambda header: header.update(image=[3, 16, 64]), other),
        (lambda header: header.clear(), "header must be an object of JSON with a version"),
    ):
        refused(target, header_changed(state, change), message, strict)
    linear = quantised(model, 4, recipe=qflash.DEFAULT.replace(exponential="linear"))
    refused(target, linear.state_dict(), other, strict)


def test_names_that_are_missing_or_not_known(made: Made) -> None:
    model, network = made("class token")
    target = copy.deepcopy(network)
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        target.load_state_dict({})
    assert all(name in str(caught.value) for name in network.state_dict())
    target.load_state_dict({}, strict=False)
    state = quantised(model, 4).state_dict()
    for name in ("other", "parts.blocks.0.other", "parts.blocks.7.mlp.fc1.weight"):
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{name}"'):
            target.load_state_dict(state | {name: torch.zeros(1)})
        assert target.load_state_dict(state | {name: torch.zeros(1)}, strict=False) == ([], [name])
        assert same(target, quantised(model, 4))


@pytest.mark.parametrize("part", ["head", "blocks.0.attn.core", "blocks.0.mlp.fc1", "norm"])
def test_parts_are_not_loaded_by_themselves(made: Made, part: str) -> None:
    model, network = made("class token")
    target = copy.deepcopy(network)
    state = quantised(model, 4).part(part).state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"part of an integer network, which is loaded as a whole.*qflash\.load_model"):
            target.part(part).load_state_dict(state, strict=strict)
    assert same(target, network)


def test_networks_with_float_parts(made: Made) -> None:
    model, network = made("class token")
    mixed = quantised(model, 3, keep_float=["blocks.0.mlp"])
    other = quantised(model, 4, keep_float=["blocks.0.mlp"])
    assert not same(other, mixed)
    other.load_state_dict(mixed.state_dict())
    assert same(other, mixed) and other.scales == mixed.scales
    with pytest.raises(RuntimeError, match="Unexpected key"):
        copy.deepcopy(network).load_state_dict(mixed.state_dict())


def test_copies_and_pickles_keep_all(pair: tuple[Any, Any, Any]) -> None:
    _, network, _ = pair
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert same(other, network) and other.units == network.units


def test_a_state_dict_does_not_disturb_tools(made: Made) -> None:
    model, network = made("class token")
    images = draw(model, 2, 3)
    program = torch.export.export(network, (images,))
    assert torch.equal(program.module()(images), network(images))
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, content)
    content.seek(0)
    assert torch.equal(torch.export.load(content).module()(images), network(images))
    compiled = torch.compile(copy.deepcopy(network), backend="eager", fullgraph=True)
    other = quantised(model, 4)
    before = compiled(images)
    compiled.load_state_dict({f"_orig_mod.{name}": x for name, x in other.state_dict().items()})
    assert torch.equal(compiled(images), other(images)) and not torch.equal(before, compiled(images))
    assert network.state_dict()[EXTRA].dtype == torch.uint8
    empty = storage.network_from_header(
        storage.network_header(network), {name: x.clone() for name, x in storage.network_tensors(network).items()}
    )
    for part in storage.network_tensors(empty).values():
        part.zero_()
    empty.load_state_dict(network.state_dict())
    assert torch.equal(empty(images), network(images))
    assert len(list(network.buffers())) == len(list(empty.buffers()))
