"""Files of version 1, which an earlier QFlash wrote, load and give the logits that it gave; and damaged ones do not load."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import qflash
from qflash.network import storage
from small_networks import in_ours, memory_of_refusals, note_devices, rewrite

FOLDER = Path(__file__).parent / "first_form"
LOGITS = json.loads((FOLDER / "logits.json").read_text(encoding="utf-8"))
"""Of the files there, for :func:`pixels`; all that QFlash before the graph wrote and computed."""


def pixels() -> torch.Tensor:
    """Return two images, uint8 (2, 3, 8, 8)."""
    return (torch.arange(2 * 3 * 64).view(2, 3, 8, 8) * 2654435761 % (1 << 32) >> 24).to(torch.uint8)


def ours_of(content: bytes) -> dict[str, Any]:
    end = 8 + int(struct.unpack("<Q", content[:8])[0])
    found: dict[str, Any] = json.loads(json.loads(content[8:end])["__metadata__"][storage.KEY])
    return found


@pytest.mark.parametrize("name", LOGITS)
def test_a_file_has_the_logits_that_it_had(name: str, tmp_path: Path) -> None:
    network = qflash.load_model(FOLDER / f"{name}.safetensors")
    for backend in ("reference", "cpu"):
        network.backend = backend
        assert network(pixels()).tolist() == LOGITS[name]
    ours = ours_of((FOLDER / f"{name}.safetensors").read_bytes())
    assert ours["version"] == 1
    assert (network.output_scale, list(network.units)) == (ours["output_scale"], ours["units"])
    assert network.quality is not None and network.quality.sqnr_db == ours["quality"]["sqnr_db"]
    # and in the present form
    network.save(tmp_path / "again")
    assert ours_of((tmp_path / "again").read_bytes())["version"] == storage.VERSION
    again = qflash.load_model(tmp_path / "again")
    assert again(pixels()).tolist() == LOGITS[name] and again.nodes == network.nodes


@pytest.mark.parametrize("name", LOGITS)
def test_a_file_is_written_as_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    qflash.load_model(FOLDER / f"{name}.safetensors").export_onnx(tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"images": pixels().numpy()})[0].tolist() == LOGITS[name]


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
    "constants.blocks": ({}, None),
    "quality": (None, 1, [], {}, "x"),
    "shape": (None, [], {}, 1, "x"),
    "unknown": (1, None),
    "shape.unknown": (1, None),
    **{f"shape.{name}": SIZES for name in ("image_channels", "channels", "depth", "heads", "head_dim", "hidden")},
    "shape.prefix_tokens": tuple(x for x in SIZES if x != 1 or x is True),
    "shape.outputs": SIZES,
}  # fmt: skip
"""Entries of a header and what must not stand there."""
STAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("shifts", "grid", "window"), ("{}", None, 1, [], {}, "[[0, 0]]", [[0, 0, 0]], [[4, 0]], [[-1, 0]], [0],
                                                   [[True, 0]])),
    **dict.fromkeys(("channels", "heads", "head_dim", "hidden"), SIZES),
    "unknown": (1,),
}  # fmt: skip


def refused(tmp_path: Path, name: str, change: Any) -> None:
    path = tmp_path / "network.safetensors"
    path.write_bytes(rewrite((FOLDER / f"{name}.safetensors").read_bytes(), in_ours(change)))
    with pytest.raises(ValueError, match="holds no whole integer network"):
        qflash.load_model(path, verify=False)
    with pytest.raises(ValueError, match="holds no whole integer network"):
        qflash.load_model(path)


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_value_in_a_header_is_refused(tmp_path: Path, field: str) -> None:
    *way, last = field.split(".", 1)
    for value in FIELDS[field]:

        def change(ours: dict[str, Any], value: Any = value) -> None:
            for key in way:
                ours = ours[key]
            ours[last] = value

        refused(tmp_path, "class_token", change)


@pytest.mark.parametrize("field", STAGE_FIELDS)
def test_odd_stages_are_refused(tmp_path: Path, field: str) -> None:
    for value in STAGE_FIELDS[field]:
        refused(tmp_path, "swin", lambda ours, v=value: ours["shape"]["stages"][0].update({field: v}))
        refused(tmp_path, "swin", lambda ours, v=value: ours["shape"].update(stages=v))


@pytest.mark.parametrize("name", LOGITS)
def test_every_entry_of_a_header_is_needed(tmp_path: Path, name: str) -> None:
    ours = ours_of((FOLDER / f"{name}.safetensors").read_bytes())
    for entry in ours.keys() - {"quality", "sha256"}:
        refused(tmp_path, name, lambda ours, entry=entry: ours.pop(entry))
    for entry in ours["shape"].keys() - {"qk_norm"}:
        refused(tmp_path, name, lambda ours, entry=entry: ours["shape"].pop(entry))


def test_without_a_digest_it_loads_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "network.safetensors"
    path.write_bytes(rewrite((FOLDER / "swin.safetensors").read_bytes(), in_ours(lambda ours: ours.pop("sha256"))))
    with pytest.raises(ValueError, match="has no SHA-256"):
        qflash.load_model(path)
    assert qflash.load_model(path, verify=False)(pixels()).tolist() == LOGITS["swin"]


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
    "grid": [1024, 1024], "window": [1, 1], "shifts": [[0, 0]] * 100, "channels": 8, "heads": 1, "head_dim": 8, "hidden": 8,
}  # fmt: skip
SWIN = {"image_size": [1024, 1024], "patch_size": [1, 1], "image_channels": 3, "stages": [STAGE], "outputs": 2,
        "recipe": qflash.DEFAULT.key}  # fmt: skip
HOSTILE = {
    "hidden": ("VisionTransformer", SMALL | {"hidden": 50_000_000}),
    "hidden within its range": ("VisionTransformer", SMALL | {"hidden": 1 << 20, "channels": 4096, "depth": 100}),
    "image": ("VisionTransformer", SMALL | {"image_size": [8192, 8192], "patch_size": [1, 1]}),
    "patch": ("VisionTransformer", SMALL | {"image_size": [8192, 8192], "patch_size": [8192, 8192], "channels": 4096}),
    "depth": ("VisionTransformer", SMALL | {"depth": 1 << 20}),
    "tables of windows": ("SwinTransformer", SWIN),
    "tables of few windows": ("SwinTransformer", SWIN | {"stages": [STAGE | {"shifts": [[0, 0]] * 10}]}),
    "bias of windows": ("SwinTransformer", SWIN | {"stages": [STAGE | {"window": [1024, 1024], "heads": 1 << 20}]}),
    "more windows": ("SwinTransformer", SWIN | {"image_size": [8192, 8192], "stages": [STAGE | {"grid": [8192, 8192]}]}),
    "blocks without end": ("SwinTransformer", SWIN | {"stages": [STAGE | {"shifts": [[0, 0]] * 100_000}]}),
}  # fmt: skip


def test_a_hostile_header_takes_no_memory(tmp_path: Path) -> None:
    files = []
    for index, (kind, shape) in enumerate(HOSTILE.values()):
        files.append(str(tmp_path / f"{index}.safetensors"))
        file_of(shape, Path(files[-1]), kind)
    assert memory_of_refusals(files) < 60_000


def test_shapes_are_compared_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = note_devices(monkeypatch)
    for field, value in (("hidden", 16), ("channels", 16), ("prefix_tokens", 3), ("image_size", [16, 16]), ("outputs", 3)):
        refused(tmp_path, "class_token", lambda ours, f=field, v=value: ours["shape"].update({f: v}))
    assert set(places) == {"meta"}
