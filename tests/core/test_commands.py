"""``qflash convert``, ``coverage``, ``predict`` and ``time``: on a folder of transformers, one of timm, and a timm name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qflash
from qflash.cli import app
from qflash.commands import Images, find_device, parse_size
from qflash.integrations.hub import load_float_model
from small_networks import timm

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
runner = CliRunner()
CLASSES = ("shirt", "bag", "boot", "coat", "dress", "shoe")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(24):
        coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        (folder / f"class{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((80, 60)).save(folder / f"class{number % 2}" / f"{number}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers as ``save_pretrained`` leaves it."""
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=6, id2label=dict(enumerate(CLASSES)), layerscale_value=0.5, initializer_range=0.2,
    )  # fmt: skip
    transformers.Dinov2ForImageClassification(config).save_pretrained(folder)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timm")
    arguments = {"depth": 1, "embed_dim": 48, "num_heads": 2, "num_classes": 4, "img_size": 32, "patch_size": 8}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def converted(hub_folder: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("onnx")
    file = tmp_path_factory.mktemp("converted") / "network.qf"
    words = ["--onnx", str(file.with_suffix(".onnx")), "--outputs", "logits,tokens", "--calibrate", "16", "--format", "json"]
    result = runner.invoke(app, ["convert", str(hub_folder), str(images), "-o", str(file), *words])
    assert result.exit_code == 0, result.output
    return file, json.loads(result.stdout)


def test_convert_writes_a_network_and_says_how_close_it_is(converted: tuple[Path, Any], images: Path, hub_folder: Path) -> None:
    file, report = converted
    network = qflash.load_model(file)
    assert network.about["labels"] == list(CLASSES) and list(network.outputs) == ["logits", "tokens"]
    found = load_float_model(str(hub_folder))
    pixels = torch.cat(list(Images(images, found.transform, shuffled=True).batches(16)))
    assert len(pixels) == report["compared_images"] == 8 and report["held_out"] and report["calibration_images"] == 16
    mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (found.transform.mean, found.transform.std))
    with torch.inference_mode():
        wanted = found.model((pixels / 255 - mean) / std).logits
        made = network.dequantize(network(pixels))["logits"]
    row = report["outputs"]["logits"]
    assert row["shape"] == [6] and report["outputs"]["tokens"]["shape"] == [17, 32]
    assert row["sqnr_db"] == pytest.approx(
        float(10 * torch.log10(wanted.square().sum() / (wanted - made).square().sum())), abs=0.1
    )
    assert row["agreement_percent"] == 100 * float((wanted.argmax(1) == made.argmax(1)).double().mean())
    assert row["sqnr_db"] > 20 and row["least_cosine"] > 0.99
    assert report["files_mb"] == {str(each): round(each.stat().st_size / 1e6, 3) for each in (file, file.with_suffix(".onnx"))}
    assert len(report["worst_parts_db"]) == 3 and all(part.startswith("dinov2.") for part in report["worst_parts_db"])
    assert min(report["milliseconds_an_image"].values()) > 0


def test_convert_prints_a_table(timm_folder: Path, images: Path, tmp_path: Path) -> None:
    file = tmp_path / "network"
    words = ["convert", str(timm_folder), str(images), "-o", str(file), "--calibrate", "24", "--recipe", "accurate"]
    result = runner.invoke(app, [*words, "--keep-float", "blocks.0.mlp"])
    assert result.exit_code == 0, result.output
    for text in (
        "SQNR",
        "24 images of calibration",
        "saturated:",
        "float32 weights:",
        "worst parts",
        "in floating point: blocks.0",
    ):
        assert text in result.stdout
    network = qflash.load_model(file)
    assert network.recipe == qflash.ACCURATE and network.image == (3, 32, 32) and network.about["images"]["crop_pct"] == 0.9


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_name_with_random_weights_and_an_array(channels_last: bool, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (17, 3, 32, 48), dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels.transpose(0, 2, 3, 1) if channels_last else pixels)
    file = tmp_path / "network"
    words = ["convert", "test_vit", str(tmp_path / "images.npy"), "-o", str(file), "--size", "32x48", "--random-weights"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "random weights: this shows that conversion works" in result.stdout
    network = qflash.load_model(file)
    assert network.image == (3, 32, 48) and len(network.about["labels"]) == 1000
    output = tmp_path / "out.npy"
    result = runner.invoke(app, ["predict", str(file), str(tmp_path / "images.npy"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert np.array_equal(np.load(output), network.dequantize(network(torch.from_numpy(pixels))).numpy())


@pytest.mark.slow
def test_one_file_of_two_sizes(hub_folder: Path, images: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "network", tmp_path / "out.npy"
    words = ["convert", str(hub_folder), str(images), "-o", str(file), "--size", "32", "--size", "32x48", "--calibrate", "16"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "32 x 48 pixels: " in result.stdout
    network = qflash.load_model(file)
    assert network.image_sizes == ((32, 32), (32, 48))
    # photos of 60 x 80 are more like the second
    name = sorted(each.relative_to(images).as_posix() for each in images.rglob("*.png"))[0]
    found = load_float_model(str(hub_folder))
    for size, options in (((32, 48), []), ((32, 32), ["--size", "32"])):
        result = runner.invoke(app, ["predict", str(file), str(images), "--output", str(output), *options])
        assert result.exit_code == 0, result.output
        with Image.open(images / name) as image:
            pixels = qflash.image_transform(found.images, size)(image)[None]
        assert np.array_equal(np.load(output)[0], network.dequantize(network(pixels))[0].numpy())
    assert runner.invoke(app, ["time", str(file), "--batch", "1", "--rounds", "1", "--size", "32x48"]).exit_code == 0
    result = runner.invoke(app, ["predict", str(file), str(images), "--size", "48"])
    assert result.exit_code == 1 and "32 x 32, 32 x 48" in result.output


def test_predict_names_the_likeliest_classes(
    converted: tuple[Path, Any], images: Path, hub_folder: Path, tmp_path: Path
) -> None:
    file, _ = converted
    result = runner.invoke(app, ["predict", str(file), str(images), "--format", "json", "--top", "6"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["image"] for row in rows] == sorted(each.relative_to(images).as_posix() for each in images.rglob("*.png"))
    network, found = qflash.load_model(file), load_float_model(str(hub_folder))
    with Image.open(images / rows[3]["image"]) as image:
        pixels = found.transform(image)[None]
    likely = network.dequantize(network(pixels))["logits"].softmax(1)[0]
    assert [label for label, _ in rows[3]["classes"]] == [CLASSES[place] for place in likely.argsort(descending=True)]
    assert sum(value for _, value in rows[3]["classes"]) == pytest.approx(1)
    for name, text in (("a.txt", "\n".join("ABCDEF")), ("a.json", json.dumps({"id2label": dict(enumerate("ABCDEF"))}))):
        (tmp_path / name).write_text(text)
        result = runner.invoke(app, ["predict", str(file), str(images), "--labels", str(tmp_path / name), "--top", "1"])
        first = rows[0]["classes"][0][0]
        assert result.stdout.splitlines()[0].startswith(f"{rows[0]['image']}: {'ABCDEF'[CLASSES.index(first)]} ")


def test_predict_writes_all_outputs(converted: tuple[Path, Any], images: Path, tmp_path: Path) -> None:
    file, _ = converted
    result = runner.invoke(app, ["predict", str(file), str(images), "--output", str(tmp_path / "out.npz")])
    assert result.exit_code == 0, result.output
    arrays = np.load(tmp_path / "out.npz")
    assert {name: arrays[name].shape for name in arrays} == {"logits": (24, 6), "tokens": (24, 17, 32)}
    result = runner.invoke(app, ["predict", str(file), str(images), "--output", str(tmp_path / "out.npy")])
    assert result.exit_code == 1 and "--output must end in .npz for outputs logits, tokens" in result.output


def test_time_prints_medians(converted: tuple[Path, Any]) -> None:
    words = ["time", str(converted[0]), "--batch", "1", "--batch", "3", "--rounds", "4", "--threads", "1"]
    threads = torch.get_num_threads()
    result = runner.invoke(app, [*words, "--device", "cpu", "--format", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert torch.get_num_threads() == threads and report["device"].startswith("1 threads of")
    assert [row["batch"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert 0 < row["least ms"] <= row["median ms"] <= row["most ms"]
        assert row["images a second"] == pytest.approx(1000 * row["batch"] / row["median ms"], rel=0.02)
    assert "images a second" in runner.invoke(app, [*words, "--device", "cpu"]).stdout


def test_coverage_of_what_becomes_integers(hub_folder: Path) -> None:
    result = runner.invoke(app, ["coverage", str(hub_folder), "--outputs", "logits,hidden_states.1", "--format", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["integers"] and report["nodes"]["Attention"] == 2 and report["refused"] == {}
    assert report["outputs"] == {"logits": [6], "hidden_states.1": [17, 32]}
    assert report["captured_db"] > 90 and report["sqnr_db"] > 20
    shown = runner.invoke(app, ["coverage", str(hub_folder)]).stdout
    assert "all integers" in shown and "on 4 drawn images: SQNR " in shown and "less than 20 dB" not in shown
    shown = runner.invoke(app, ["coverage", str(hub_folder), "--no-compute"]).stdout
    assert "all integers" in shown and "nothing was computed" in shown and "SQNR" not in shown


def test_coverage_names_all_that_does_not(tmp_path: Path) -> None:
    """Two operations of a block have no integer form, in three blocks."""
    result = runner.invoke(app, ["coverage", "cait_xxs24_224", "--random-weights", "--format", "json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert not report["integers"] and report["attention"]["integer"] < 26
    assert any("blocks.0.attn" in reason and "cait.py" in reason for reason in report["refused"])
    assert 24 in report["refused"].values()


def test_coverage_of_what_holds_no_attention() -> None:
    result = runner.invoke(app, ["coverage", "test_resnet", "--random-weights", "--no-compute", "--format", "json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["attention"] == {"integer": 0, "float": 0}
    assert any("convolution" in reason for reason in report["refused"])


def test_what_pools_by_tanh_is_converted_without(images: Path, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    words = ["convert", str(tmp_path / "vit"), str(images), "-o", str(tmp_path / "network"), "--compare", "1"]
    result = runner.invoke(app, words)
    assert result.exit_code == 1
    assert "tanh in pooler.activation" in result.stderr
    assert result.stderr.rstrip().endswith("; outputs=['last_hidden_state'] leaves it out")
    result = runner.invoke(app, ["coverage", str(tmp_path / "vit"), "--format", "json"])
    (reason,) = json.loads(result.stdout)["refused"]
    assert reason.endswith("; outputs=['last_hidden_state'] leaves it out")
    assert runner.invoke(app, [*words, "--outputs", "last_hidden_state"]).exit_code == 0


TWO = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_classifier_of_a_model_with_two_towers(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(vision_config=TWO, text_config=TWO, num_labels=3)
    made = getattr(transformers, f"{kind}ForImageClassification")(config)
    made.save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    found = load_float_model(str(tmp_path))
    assert type(found.model) is type(made)
    assert all(torch.equal(x, made.state_dict()[name]) for name, x in found.model.state_dict().items())
    assert type(load_float_model(str(tmp_path), random_weights=True).model) is type(made)


def test_weights_that_are_not_there_are_no_model(tmp_path: Path) -> None:
    config = transformers.CLIPConfig(vision_config=TWO, text_config=TWO)
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    lost = "vision_model.post_layernorm.bias"
    save_file({name: x for name, x in weights.items() if name != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"lacks 1 weights of CLIPVisionModel, which are random: .*post_layernorm\.bias"):
        load_float_model(str(tmp_path))
    texts = {name: x for name, x in weights.items() if "vision" not in name and "visual" not in name}
    save_file(texts, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no weights of a CLIPVisionModel: none of its names is there"):
        load_float_model(str(tmp_path))
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**TWO)).save_pretrained(tmp_path / "texts")
    with pytest.raises(ValueError, match=r"got \['CLIPTextModel'\]; quantize_model takes encoders of texts"):
        load_float_model(str(tmp_path / "texts"))


WRONG: dict[str, tuple[list[str], str]] = {
    "a name that timm lacks": (["coverage", "vit_tny"], "no model and no folder 'vit_tny'; timm's names are alike: .*vit_"),
    "a folder without a model": (["coverage", "{images}"], "must hold a config.json of transformers or timm"),
    "an odd size": (["coverage", "test_vit", "--random-weights", "--size", "big"], "size must be pixels, as 224, or height x"),
    "no such output": (["coverage", "test_vit", "--random-weights", "--outputs", "head,nose"], "outputs must be .* got 'nose'"),
    "a folder that is not there": (
        ["convert", "test_vit", "{images}", "-o", "{images}/no/x", "--random-weights"], "there is no folder .* to write x to"
    ),
    "no images": (["convert", "test_vit", "{model}", "-o", "{tmp}/x", "--random-weights"], "holds no images of a format"),
    "text as images": (
        ["convert", "test_vit", "{images}/notes.txt", "-o", "{tmp}/x", "--random-weights"], "folder of images or a .npy file"
    ),
    "no network": (["time", "{images}/notes.txt"], "no readable safetensors file"),
    "no device": (["time", "{file}", "--device", "tpu9"], "device must be auto, cpu or cuda, got 'tpu9'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_one_line(case: str, images: Path, hub_folder: Path, converted: tuple[Path, Any], tmp_path: Path) -> None:
    words, message = WRONG[case]
    places = {"images": images, "model": hub_folder, "tmp": tmp_path, "file": converted[0]}
    result = runner.invoke(app, [word.format(**places) for word in words])
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith(f"qflash {words[0]}: ")]
    with pytest.raises(ValueError, match=message):
        raise ValueError("".join(lines))
    assert "Traceback" not in result.output


def test_features_are_no_classes(hub_folder: Path, images: Path, tmp_path: Path) -> None:
    words = ["convert", str(hub_folder), str(images), "-o", str(tmp_path / "x"), "--outputs", "tokens", "--compare", "2"]
    assert runner.invoke(app, words).exit_code == 0
    result = runner.invoke(app, ["predict", str(tmp_path / "x"), str(images)])
    assert result.exit_code == 1 and "outputs tokens are no classes; --output writes them" in result.output


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3, 8, 8)), "must be uint8"), (np.zeros((2, 8, 8), np.uint8), r"or \(images, height, width, 3\), is"),
        (np.zeros((0, 3, 8, 8), np.uint8), "holds no images"),
    ],
)  # fmt: skip
def test_arrays_of_another_form_are_refused(array: Any, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    transform = qflash.image_transform({"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    with pytest.raises(ValueError, match=message):
        Images(tmp_path / "x.npy", transform)


def test_arrays_of_another_size_are_resized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 20, 24), dtype=np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    transform = qflash.image_transform({"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    (found,) = Images(tmp_path / "x.npy", transform).batches()
    assert torch.equal(found[1], transform(Image.fromarray(pixels[1].transpose(1, 2, 0))))


def test_a_file_that_is_no_image_is_named(images: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    transform = qflash.image_transform({"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    with pytest.raises(ValueError, match=r"a\.png is no image that PIL reads"):
        list(Images(tmp_path, transform).batches())


PLAIN = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    """As the camera says that it was held."""
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    data = Image.Exif()
    data[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "x.png", exif=data)
    transform = qflash.image_transform(PLAIN)
    assert torch.equal(next(Images(tmp_path, transform).batches())[0], transform(upright))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("16 bits", "8 bits a channel, has mode I;16"),
        ("too large", "no image that PIL reads"),
        ("cut off", "no image that PIL reads"),
    ],
)
def test_the_file_of_an_image_that_is_not_taken_is_named(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 65536, (64, 64), dtype=np.uint16)
    (Image.fromarray(pixels) if kind == "16 bits" else Image.fromarray(pixels.astype(np.uint8))).save(tmp_path / "x.png")
    if kind == "too large":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    elif kind == "cut off":
        (tmp_path / "x.png").write_bytes((tmp_path / "x.png").read_bytes()[:2000])
    with pytest.raises(ValueError, match=rf"x\.png.*{message}"):
        next(Images(tmp_path, qflash.image_transform(PLAIN)).batches())


def test_files_that_hold_something_else_are_named(converted: tuple[Path, Any], images: Path, tmp_path: Path) -> None:
    with open(tmp_path / "several.npy", "wb") as several:
        np.savez(several, a=np.zeros(3))
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04")
    (tmp_path / "x.npy").write_bytes(b"no array")
    for name in ("x", "zip", "several"):
        with pytest.raises(ValueError, match=rf"{name}\.npy is no array that numpy\.save wrote"):
            Images(tmp_path / f"{name}.npy", qflash.image_transform(PLAIN))
    photo = next(images.rglob("*.png"))
    (tmp_path / "list.json").write_text("[")
    for file in (photo, tmp_path / "list.json"):
        result = runner.invoke(app, ["predict", str(converted[0]), str(images), "--labels", str(file)])
        assert result.exit_code == 1 and f"or JSON: a list, or classes by number, is {file}: " in result.stderr


def test_sizes_and_devices() -> None:
    assert (parse_size(None), parse_size("224"), parse_size("32x48")) == (None, (224, 224), (32, 48))
    for text in ("", "0", "3x", "1x2x3", "-3", "x"):
        with pytest.raises(ValueError, match="size must be pixels"):
            parse_size(text)
    assert find_device("cpu") == torch.device("cpu") and find_device("auto").type in ("cpu", "cuda")


def test_positions_are_resampled_for_another_size(hub_folder: Path) -> None:
    """The model is the same at its own size, and takes another."""
    one, other = load_float_model(str(hub_folder)), load_float_model(str(hub_folder), size=(32, 48))
    assert one.transform.size == (3, 32, 32) and other.transform.size == (3, 32, 48)
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(one.model(x).logits, other.model(x).logits)
        assert other.model(torch.randn(1, 3, 32, 48)).logits.shape == (1, 6)


def test_the_tower_of_images_is_taken_of_a_model_of_two(tmp_path: Path) -> None:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8}, text_config={**tower, "vocab_size": 50}
    )
    transformers.SiglipModel(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    found = load_float_model(str(tmp_path))
    assert type(found.model).__name__ == "SiglipVisionModel" and not found.labels
    with torch.inference_mode():
        assert found.model(torch.zeros(1, 3, 32, 32)).pooler_output.shape == (1, 32)


@pytest.mark.parametrize("about", [{"labels": [1]}, {"name": 3}, {"other": 1}, [], {"images": []}])
def test_what_a_file_says_of_its_model_has_a_form(about: Any, converted: tuple[Path, Any], tmp_path: Path) -> None:
    network = qflash.load_model(converted[0])
    network.about = about
    with pytest.raises(ValueError, match="about"):
        network.save(tmp_path / "x")


def test_a_processor_that_transformers_lacks_is_refused() -> None:
    for name in ("Nothing", "ViTConfig", "pipeline"):
        with pytest.raises(ValueError, match="image_processor_type must be one of transformers"):
            qflash.image_transform({"image_processor_type": name})
