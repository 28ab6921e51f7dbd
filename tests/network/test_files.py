"""Files and ``state_dict`` of integer networks: damaged, hostile, half written, and of other networks."""

from __future__ import annotations

import copy
import errno
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
from qflash.network import modules, storage
from qflash.network.models import VisionTransformer
from small_networks import KINDS, build, draw, in_ours, rewrite

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
    for bit in random.Random(0).sample(bits, 400):
        assert not loads_equal_or_not_at_all(path, flipped(content, bit), network), bit


def test_a_flipped_bit_of_the_header_is_refused_or_changes_nothing(network: Any, path: Path) -> None:
    content = path.read_bytes()
    end = header_length(content)
    # a bit of every byte, all of those of the last, and of those before tensors' names begin
    bits = {8 * byte + byte % 8 for byte in range(end)} | set(range(96)) | set(range(8 * (end - 8), 8 * end))
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
    with pytest.raises(ValueError, match=r"has no SHA-256.*quantise the model again, or load it with verify=False and save it"):
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
FIELDS: dict[str, tuple[Any, ...]] = {
    "shape.softmax_scale": (*NUMBERS, 2.0**61, 2.0**-61),
    "output_scale": NUMBERS,
    "units": (*(x for x in NUMBERS if x != [1.0]), [], [1.0, 1.0], [1e300], [True], [[1.0]], [None], [float("nan")]),
    "shape.recipe": ("{}", "", "default", "[]", "{", "[" * 100000, None, 1, {}, '{"probability_bits": 8}', '{"x": 1}'),
    "shape.image_size": (8, [8], [8, 8, 8], [8, 8.0], [8, True], [0, 8], [-8, 8], [7, 8], "88", {}, None, [10**400, 8],
                         [[8], 8]),
    "shape.patch_size": (4, [4], [4, 4, 4], [4, 0], [3, 4], [4, True], "44", {}, None, [16, 16]),
    "shape.pool": ("", "mean", "max", None, True, ["token"], {}),
    "shape.first_norm": (0, 1, None, "true", [], True),
    "shape.qk_norm": (0, 1, None, "true", [], True),
    "version": (0, 2, True, 1.0, "1", None, [], {}),
    "arithmetic_version": (0, 1, True, "2", 2.0, None, [], {}, 10**400),
    "kind": ("", "Vision", "SwinTransformer", None, 1, [], {}, ["VisionTransformer"]),
    "constants": (None, [], {}, 1, "x"),
    "constants.head": (None, [], {}, 1, {"left": True}, {"left": 1.0}, {"left": "1"}, {"left": -1}, {"left": 31},
                       {"left": 10**400}, {"left": 1, "right": 1}),
    "constants.norm": ({"epsilon": -1, "shift": 1}, {"epsilon": 1 << 54, "shift": 1}, {"epsilon": 0, "shift": 30},
                       {"shift": 1}),
    "shape": (None, [], {}, 1, "x"),
    "unknown": (1, None),
    "shape.unknown": (1, None),
    **{f"shape.{name}": SIZES for name in ("image_channels", "channels", "depth", "heads", "head_dim", "hidden")},
    "shape.prefix_tokens": tuple(x for x in SIZES if x != 1 or x is True),
    "shape.outputs": SIZES,
}  # fmt: skip
"""Entries of a header and what must not stand there."""


@pytest.mark.parametrize(("field", "index"), [(field, i) for field, values in FIELDS.items() for i in range(len(values))])
def test_an_odd_value_in_a_header_is_refused(path: Path, field: str, index: int) -> None:
    value = FIELDS[field][index]

    def change(ours: dict[str, Any]) -> None:
        *way, last = field.split(".", 1)
        for key in way:
            ours = ours[key]
        ours[last] = value

    path.write_bytes(rewrite(path.read_bytes(), in_ours(change)))
    with pytest.raises(ValueError, match="holds no whole integer network"):
        qflash.load_model(path, verify=False)


@pytest.mark.parametrize("value", ["{}", None, 1, [], {}, "[[0, 0]]", [[0, 0, 0]], [[4, 0]], [[-1, 0]], [0], [[True, 0]]])
def test_odd_shifts_of_a_swin_are_refused(made: Made, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "swin.safetensors"
    made("swin")[1].save(path)
    content = path.read_bytes()
    for field, other in (("shifts", value), ("grid", value), ("window", value)):
        path.write_bytes(rewrite(content, in_ours(lambda ours, f=field, v=other: ours["shape"]["stages"][0].update({f: v}))))
        with pytest.raises(ValueError, match="holds no whole integer network"):
            qflash.load_model(path, verify=False)
    path.write_bytes(rewrite(content, in_ours(lambda ours: ours["shape"].update(stages=value))))
    with pytest.raises(ValueError, match="holds no whole integer network"):
        qflash.load_model(path, verify=False)


def test_every_entry_of_a_header_is_needed(path: Path) -> None:
    content = path.read_bytes()
    ours = json.loads(json.loads(content[8 : header_length(content)])["__metadata__"][storage.KEY])
    for name in ours:
        path.write_bytes(rewrite(content, in_ours(lambda ours, name=name: ours.pop(name))))
        with pytest.raises(ValueError, match="holds no whole integer network"):
            qflash.load_model(path)


# --- hostile headers ------------------------------------------------------------------------------------------


def file_of(shape: dict[str, Any], path: Path, kind: str = "VisionTransformer", tensors: int = 130) -> None:
    """Write a small file with a shape of one's choice and as many tensors as blocks could need."""
    header = {"version": 1, "arithmetic_version": storage.ARITHMETIC_VERSION, "kind": kind, "shape": shape, "constants": {},
              "output_scale": 1.0, "units": [1.0]}  # fmt: skip
    save_file({f"x{i}": torch.zeros(1, dtype=torch.int8) for i in range(tensors)}, path, {storage.KEY: json.dumps(header)})


SMALL = {
    "image_size": [8, 8], "patch_size": [4, 4], "image_channels": 3, "channels": 8, "depth": 1, "heads": 1, "head_dim": 8,
    "hidden": 8, "prefix_tokens": 1, "pool": "token", "outputs": 2, "first_norm": False, "softmax_scale": 0.3,
    "recipe": qflash.DEFAULT.key,
}  # fmt: skip
STAGE = {
    "grid": [1024, 1024],
    "window": [1, 1],
    "shifts": [[0, 0]] * 100,
    "channels": 8,
    "heads": 1,
    "head_dim": 8,
    "hidden": 8,
}
SWIN = {"image_size": [1024, 1024], "patch_size": [1, 1], "image_channels": 3, "stages": [STAGE], "outputs": 2,
        "recipe": qflash.DEFAULT.key}  # fmt: skip
HOSTILE = {
    "hidden": ("VisionTransformer", SMALL | {"hidden": 50_000_000}),
    "hidden within its range": ("VisionTransformer", SMALL | {"hidden": 1 << 20, "channels": 4096, "depth": 100}),
    "image": ("VisionTransformer", SMALL | {"image_size": [8192, 8192], "patch_size": [1, 1]}),
    "patch": ("VisionTransformer", SMALL | {"image_size": [8192, 8192], "patch_size": [8192, 8192], "channels": 4096}),
    "depth": ("VisionTransformer", SMALL | {"depth": 1 << 20}),
    "tables of windows": ("SwinTransformer", SWIN),
    "bias of windows": ("SwinTransformer", SWIN | {"stages": [STAGE | {"window": [1024, 1024], "heads": 1 << 20}]}),
    "more windows": ("SwinTransformer", SWIN | {"image_size": [8192, 8192], "stages": [STAGE | {"grid": [8192, 8192]}]}),
    "blocks without end": ("SwinTransformer", SWIN | {"stages": [STAGE | {"shifts": [[0, 0]] * 100_000}]}),
}  # fmt: skip

MEASURE = """
import resource, sys, qflash
from qflash.network import storage
import safetensors.torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for verify in (True, False):
        try:
            qflash.load_model(path, verify=verify)
        except ValueError as error:
            pass
        else:
            raise SystemExit(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_hostile_header_takes_no_memory(tmp_path: Path) -> None:
    files = []
    for index, (kind, shape) in enumerate(HOSTILE.values()):
        files.append(str(tmp_path / f"{index}.safetensors"))
        file_of(shape, Path(files[-1]), kind)
    done = subprocess.run([sys.executable, "-c", MEASURE, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # kilobytes
    assert int(done.stdout) < 60_000


def test_shapes_are_compared_before_memory_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    build_buffer = modules.IntegerModule._buffer

    def noted(self: Any, name: str, *form: Any, **options: Any) -> None:
        build_buffer(self, name, *form, **options)
        places.append(self._buffers[name].device.type)

    monkeypatch.setattr(modules.IntegerModule, "_buffer", noted)
    content = path.read_bytes()
    for field, value in (("hidden", 16), ("channels", 16), ("prefix_tokens", 2), ("image_size", [16, 16]), ("outputs", 3)):
        path.write_bytes(rewrite(content, in_ours(lambda ours, f=field, v=value: ours["shape"].update({f: v}))))
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
    other.head.bias += 1
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


def quantised(model: Any, seed: int, **options: Any) -> Any:
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
    shared = target.head.bias.data_ptr() == source.head.bias.data_ptr()
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
    refused(target, {"head.bias": state["head.bias"]}, "lacks '_extra_state'", strict)
    part = {name: x for name, x in state.items() if name != "head.bias"}
    refused(target, part, r"tensors \['head.bias'\] are missing", strict)
    for name, x, message in (
        (EXTRA, state[EXTRA].to(torch.int8), "'_extra_state' in the state_dict must be a uint8 tensor"),
        (EXTRA, state[EXTRA][:-1], "network stays as it is|VisionTransformer stays as it is"),
        (EXTRA, "{}", "'_extra_state' in the state_dict must be a uint8 tensor"),
        ("head.bias", state["head.bias"].float(), r"head\.bias must be torch\.int32 \(10,\), is torch\.float32"),
        ("head.bias", state["head.bias"].long(), r"head\.bias must be torch\.int32 \(10,\), is torch\.int64"),
        ("head.bias", state["head.bias"][:5], r"head\.bias must be torch\.int32 \(10,\), is torch\.int32 \(5,\)"),
        ("head.bias", [1, 2], "head.bias in the state_dict must be a tensor"),
        ("head.bias", state["head.bias"].to("meta"), "head.bias in the state_dict must be a tensor with numbers"),
        ("head.multiplier", torch.full_like(state["head.multiplier"], -1), "head: multiplier must be from 0"),
    ):
        refused(target, state | {name: x}, message, strict)
    for change, message in (
        (lambda header: header["constants"]["head"].update(left=31), "head: left must be from 0 to 30, got 31"),
        (lambda header: header.update(arithmetic_version=1), "arithmetic version 1"),
        (lambda header: header.update(output_scale=float("nan")), "JSON has no NaN"),
        (lambda header: header.update(output_scale=1e300), "output_scale must be a number"),
        (lambda header: header["shape"].update(softmax_scale=0.5), "the state_dict is of a VisionTransformer with"),
        (lambda header: header["shape"].update(recipe=qflash.PAPER.key), "the state_dict is of a VisionTransformer with"),
        (lambda header: header["shape"].update(image_size=[16, 64]), "the state_dict is of a VisionTransformer with"),
        (lambda header: header.clear(), "header must be an object of JSON with a version"),
    ):
        refused(target, header_changed(state, change), message, strict)
    other = quantised(model, 4, recipe=qflash.DEFAULT.replace(exponential="linear"))
    refused(target, other.state_dict(), "the state_dict is of a VisionTransformer with", strict)


def test_names_that_are_missing_or_not_known(made: Made) -> None:
    model, network = made("class token")
    target = copy.deepcopy(network)
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        target.load_state_dict({})
    assert all(name in str(caught.value) for name in network.state_dict())
    target.load_state_dict({}, strict=False)
    state = quantised(model, 4).state_dict()
    for name in ("other", "blocks.0.other", "blocks.7.fc1.weight"):
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{name}"'):
            target.load_state_dict(state | {name: torch.zeros(1)})
        assert target.load_state_dict(state | {name: torch.zeros(1)}, strict=False) == ([], [name])
        assert same(target, quantised(model, 4))


@pytest.mark.parametrize("part", ["head", "blocks", "blocks.0", "blocks.1.attn", "blocks.0.fc1", "norm"])
def test_parts_are_not_loaded_by_themselves(made: Made, part: str) -> None:
    model, network = made("class token")
    target = copy.deepcopy(network)
    state = quantised(model, 4).get_submodule(part).state_dict()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"part of an integer network, which is loaded as a whole.*qflash\.load_model"):
            target.get_submodule(part).load_state_dict(state, strict=strict)
    assert same(target, network)


def test_networks_with_float_parts(made: Made) -> None:
    model, network = made("class token")
    mixed = quantised(model, 3, keep_float=["blocks.0.mlp"])
    with pytest.raises(RuntimeError, match=r"keeps in floating point: blocks\.0\.mlp; network\.save and"):
        copy.deepcopy(mixed).load_state_dict(mixed.state_dict())
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
    empty = VisionTransformer(network.shape)
    empty.load_state_dict(network.state_dict())
    assert torch.equal(empty(images), network(images))
    assert len(list(network.buffers())) == len(list(empty.buffers()))
