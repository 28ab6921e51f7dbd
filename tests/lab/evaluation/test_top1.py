"""qflash-lab evaluate on a small image folder with saved weights, on digits, interrupted, and in two processes."""

from __future__ import annotations

import collections
import csv
import io
import json
import os
import subprocess
import sys
import types
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import qflash
from helpers import run_two_processes
from qflash_lab.cli import app

timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
from PIL import Image  # noqa: E402

from qflash_lab.evaluation import classifiers, small_models, summaries, top1  # noqa: E402
from qflash_lab.evaluation.classifiers import draw_subset, load_classifier  # noqa: E402
from qflash_lab.evaluation.integer_rows import pixels_of  # noqa: E402
from qflash_lab.evaluation.outcome_store import load_outcomes  # noqa: E402

MODEL = "test_vit"
"""A ViT of timm's for tests: 160 x 160 pixels, 101 tokens, 2 heads."""
CLASSES = ("ant", "bee", "cat")
PER_CLASS = 5
QUICK = ("qflash-default",)


def run(*args: Any, **options: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=140)
    report = top1.run_evaluate(*args, **{"device": "cpu", "workers": 0, "console": console, **options})
    return report, console.file.getvalue()  # type: ignore[attr-defined]


def draw_images(folder: Path, classes: tuple[str, ...], each: int = PER_CLASS) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = torch.randint(0, 256, (24, 30, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("images") / "val", CLASSES)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model(MODEL, num_classes=len(CLASSES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run without interruption, in one process: batches of 4 over 15 images."""
    output = tmp_path_factory.mktemp("whole") / "new" / "results"
    return output, *run([MODEL], QUICK, data=folder, weights=weights, batch=4, output=output)


def per_image(output: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((output / MODEL).glob("*.csv"))}


def test_top1_and_top5_are_those_of_the_patched_model(
    whole: tuple[Path, dict[str, Any], str], folder: Path, weights: Path
) -> None:
    output, report, _ = whole
    model, images = load_classifier(MODEL, folder, weights=weights)
    assert images.labels == [label for label in range(3) for _ in range(PER_CLASS)]
    inputs = torch.stack([images.dataset[index][0] for index in range(len(images.labels))])
    assert inputs.shape[1:] == (3, 160, 160)
    (result,) = report["models"]
    for summary, patched in zip(result["methods"], (model, None), strict=True):
        with torch.no_grad():
            logits = torch.cat([(patched or qflash.patch(model))(part) for part in inputs.split(4)])
        order = logits.argsort(1, descending=True)
        outcomes = load_outcomes(output / MODEL / f"{summary['method']}.csv")
        assert [outcome.predictions for outcome in outcomes] == [tuple(row) for row in order.tolist()]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(images.labels), reduction="none")
        torch.testing.assert_close(torch.tensor([outcome.loss for outcome in outcomes]), loss, rtol=1e-5, atol=1e-6)
        assert [outcome.id for outcome in outcomes] == [f"{name}/{index}.png" for name in CLASSES for index in range(PER_CLASS)]
        assert summary["right"] == int((order[:, 0] == torch.tensor(images.labels)).sum())
        assert summary["top5_percent"] == 100.0
    exact, other = (load_outcomes(output / MODEL / f"{summary['method']}.csv") for summary in result["methods"])
    changes = [abs(b.loss - a.loss) for a, b in zip(exact, other, strict=True)]
    assert result["methods"][1]["against_fp32"]["loss_change"] == pytest.approx(sum(changes) / len(changes))
    assert max(changes) > 0


def test_files_and_table(whole: tuple[Path, dict[str, Any], str]) -> None:
    output, report, printed = whole
    assert json.loads((output / "evaluate.json").read_text()) == report
    with (output / "evaluate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["fp32", *QUICK]
    assert all(row["images"] == "15" and row["model"] == MODEL for row in rows)
    assert xml.etree.ElementTree.parse(output / "evaluate.svg").getroot().tag.endswith("svg")
    for text in ("qflash-default", "Top-1", "to FP32", "Integer-only", "batches of 4"):
        assert text in printed
    assert report["conditions"]["data"] == "val"
    assert set(per_image(output)) == {"fp32.csv", "qflash-default.csv"}
    comparison = report["models"][0]["methods"][1]["against_fp32"]
    outcomes = [load_outcomes(output / MODEL / f"{name}.csv") for name in ("fp32", *QUICK)]
    assert summaries.compare_outcomes(*outcomes).items() <= comparison.items()
    with pytest.raises(ValueError, match="same order"):
        summaries.compare_outcomes(outcomes[0], outcomes[1][1:])
    with pytest.raises(ValueError, match="per-image"):
        load_outcomes(output / "evaluate.csv")


def test_checkpoints_of_every_kind_give_the_same(
    whole: tuple[Path, dict[str, Any], str], folder: Path, weights: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    torch.save({"state_dict": {f"module.{key}": value for key, value in load_file(weights).items()}}, tmp_path / "a.pth")
    model, _ = load_classifier(MODEL, folder, weights=tmp_path / "a.pth")
    assert classifiers.digest_weights(model) == whole[1]["models"][0]["run"]["weights"]
    torch.save({"head.weight": torch.zeros(3, 64)}, tmp_path / "b.pth")
    (tmp_path / "c.pth").write_bytes(b"junk")
    (tmp_path / "d.safetensors").write_bytes(b"junk")
    for name in ("b.pth", "c.pth", "d.safetensors"):
        with pytest.raises(ValueError, match=f"weights must hold this model's parameters, got .*{name}"):
            load_classifier(MODEL, folder, weights=tmp_path / name)
    with pytest.raises(ValueError, match="Missing key"):
        load_classifier(MODEL, folder, weights=tmp_path / "b.pth")


class PowerCutError(Exception):
    """Stops a run in the middle."""


def interrupted_after(count: int, seen: list[list[int]], classify: Any) -> Any:
    def stopping(model: Any, images: Any, batches: list[list[int]], *rest: Any) -> Iterator[Any]:
        for batch, outcomes in zip(batches, classify(model, images, batches, *rest), strict=True):
            if len(seen) == count:
                raise PowerCutError
            seen.append(batch)
            yield outcomes

    return stopping


def test_an_interrupted_run_continues(
    whole: tuple[Path, dict[str, Any], str], folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": folder, "weights": weights, "batch": 4, "output": tmp_path}
    first: list[list[int]] = []
    classify = top1._classify
    # 4 batches a method: 6 are done when the second method has done half of its own
    monkeypatch.setattr(top1, "_classify", interrupted_after(6, first, classify))
    with pytest.raises(PowerCutError):
        run([MODEL], QUICK, **options)
    assert {path.name for path in (tmp_path / MODEL).glob("qflash*")} == {f"{QUICK[0]}.part-{n}.csv" for n in ("kept", "0")}
    part = tmp_path / MODEL / f"{QUICK[0]}.part-0.csv"
    # the line that was being written, and one batch that is not whole
    part.write_text(part.read_text() + "8,cat/3.png,1,1,0,2,0,1\n9,cat/4.p")
    second: list[list[int]] = []
    monkeypatch.setattr(top1, "_classify", interrupted_after(99, second, classify))
    report, _ = run([MODEL], QUICK, **options)
    assert second == [[8, 9, 10, 11], [12, 13, 14]]
    assert per_image(tmp_path) == per_image(whole[0])
    assert report["models"] == whole[1]["models"]
    second.clear()
    run([MODEL], QUICK, **options)
    assert second == []


def test_another_run_is_refused_or_starts_anew(folder: Path, weights: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": folder, "weights": weights, "output": tmp_path}
    run([MODEL], ("fp32",), batch=4, subset=3, **options)
    mine = tmp_path / MODEL / "notes.csv"
    mine.write_text("kept")
    with pytest.raises(ValueError, match=r"another run: batch was 4 and is 3; subset was 3 and is 6"):
        run([MODEL], ("fp32",), batch=3, subset=6, **options)
    report, _ = run([MODEL], ("fp32",), batch=3, subset=6, overwrite=True, **options)
    assert report["models"][0]["images"] == 6
    assert mine.read_text() == "kept"
    outcomes = load_outcomes(tmp_path / MODEL / "fp32.csv")
    assert collections.Counter(outcome.label for outcome in outcomes) == {0: 2, 1: 2, 2: 2}
    (tmp_path / MODEL / "run.json").unlink()
    with pytest.raises(ValueError, match="says whose"):
        run([MODEL], ("fp32",), batch=3, subset=6, **options)


@pytest.mark.slow
def test_two_processes_give_the_same(
    whole: tuple[Path, dict[str, Any], str], folder: Path, weights: Path, tmp_path: Path
) -> None:
    command = ["-m", "qflash_lab", "evaluate", "--model", MODEL, "--data", str(folder), "--weights", str(weights)]
    command += ["--batch", "4", "--device", "cpu", "--workers", "0", "--output", str(tmp_path)]
    command += [word for name in QUICK for word in ("--method", name)]
    printed, silence = run_two_processes(*command)
    assert "Integer-only" in printed
    assert silence == ""
    report = json.loads((tmp_path / "evaluate.json").read_text())
    assert report["conditions"]["processes"] == 2
    assert report["models"] == whole[1]["models"]
    assert per_image(tmp_path) == per_image(whole[0])


@pytest.mark.slow
def test_torchrun_gives_the_integer_networks_of_one_process(tmp_path: Path) -> None:
    """Two processes share the images out; the first one alone calibrates, and all integers are those of a run without them."""
    command = ["-m", "qflash_lab", "evaluate", "--model", "digits-vit", "--integer", "--method", "qflash-default"]
    command += ["--subset", "20", "--batch", "4", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, before in (("one", []), ("two", torchrun)):
        words = [sys.executable, *before, *command, "--output", str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name / "evaluate.json").read_text()) for name in ("one", "two"))
    assert (one["conditions"]["processes"], two["conditions"]["processes"]) == (1, 2)
    assert two["models"] == one["models"]
    for method in ("fp32", "integer-default", "integer-accurate"):
        single, shared = (tmp_path / name / "digits-vit" / f"{method}.csv" for name in ("one", "two"))
        assert len(load_outcomes(single)) == 20 and shared.read_text() == single.read_text()


def test_digits(tmp_path: Path) -> None:
    report, _ = run(["digits-vit"], QUICK, subset=20, batch=16, output=tmp_path)
    (result,) = report["models"]
    outcomes = load_outcomes(tmp_path / "digits-vit" / "qflash-default.csv")
    assert collections.Counter(outcome.label for outcome in outcomes) == dict.fromkeys(range(10), 2)
    assert [summary["top5_percent"] for summary in result["methods"]] == [100.0, 100.0]
    assert all(summary["right"] >= 18 for summary in result["methods"])
    assert all(len(outcome.predictions) == 5 for outcome in outcomes)


def test_shipped_fashion_images(tmp_path: Path) -> None:
    report, printed = run(["fashion-vit"], ["fp32"], subset=10, output=tmp_path)
    assert report["models"][0]["run"]["data"] | {"sha256": ""} == {
        "name": classifiers.FASHION_PART,
        "images": 500,
        "sha256": "",
    }
    assert "10 images of the shipped part of Fashion-MNIST" in printed
    assert "All 10,000 test images: --data FOLDER" in printed


def test_logits_that_are_not_finite_are_wrong(
    folder: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return value * float("nan")

    method = top1.get_method("qflash-default")
    fake = types.SimpleNamespace(
        name=method.name, title=method.title, integer_only=True, bits=method.bits, attention=broken
    )  # fmt: skip
    exact = top1.get_method("fp32")
    monkeypatch.setattr(top1, "get_method", lambda name: exact if name == "fp32" else fake)
    report, printed = run([MODEL], QUICK, data=folder, weights=weights, output=tmp_path)
    summary = report["models"][0]["methods"][1]
    assert (summary["right"], summary["not_finite"]) == (0, 15)
    assert "15 images without finite logits" in printed


def test_imagenet_folders_are_found_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    names = ("n01440764", "n01498041", "n15075141")  # classes 0, 6 and 999
    torch.manual_seed(0)
    save_file(timm.create_model(MODEL).state_dict(), tmp_path / "weights.safetensors")
    data = draw_images(tmp_path / "val", names, 1)
    model, images = load_classifier(MODEL, data, weights=tmp_path / "weights.safetensors")
    assert model.num_classes == images.classes == 1000
    assert images.labels == [0, 6, 999]
    assert images.dataset[1][1] == 6


@pytest.mark.parametrize(
    ("model", "int8", "half"), [("DeiT-T", 17.2, 34.3), ("DeiT-S", 34.3, 68.7), ("Swin-T", 13.5, 26.9), ("Swin-S", 22.0, 43.9)]
)
def test_bit_operations_are_table_5s(model: str, int8: float, half: float) -> None:
    with torch.device("meta"):
        built = timm.create_model(classifiers.resolve_model_name(model)).eval()
    products = summaries.attention_products(built, (3, 224, 224))
    layers = {"DeiT-T": 12, "DeiT-S": 12, "Swin-T": 12, "Swin-S": 24}[model]
    assert len(products) == layers
    for bits, printed in ((((8, 8), (8, 8)), int8), (((8, 8), (16, 16)), half)):
        usual, papers = summaries.bit_operations(products, types.SimpleNamespace(bits=bits))
        assert round(papers, 1) == printed
        multiply_adds = sum(a for a, _ in products)
        assert usual == pytest.approx(multiply_adds * (64 + bits[1][0] ** 2) / 1e9)
    assert not any(isinstance(module, qflash.patching._Patched) for module in built.modules())


def test_subset_is_balanced_seeded_and_nested() -> None:
    labels = [0] * 50 + [1] * 20 + [2] * 3
    assert draw_subset(labels, None) == list(range(73))
    chosen = draw_subset(labels, 30)
    assert chosen == sorted(set(chosen)) == draw_subset(labels, 30)
    counts = collections.Counter(labels[place] for place in chosen)
    assert counts[2] == 3
    assert {counts[0], counts[1]} <= {13, 14}
    assert set(draw_subset(labels, 7)) < set(chosen)
    assert draw_subset(labels, 30, seed=1) != chosen
    for count in (0, 74):
        with pytest.raises(ValueError, match="subset must be between 1 and the 73"):
            draw_subset(labels, count)


def test_names() -> None:
    assert classifiers.resolve_model_name("swin-t") == "swin_tiny_patch4_window7_224.ms_in1k"
    assert classifiers.resolve_model_name("deit_small_patch16_224") == "deit_small_patch16_224"
    assert classifiers.resolve_model_name("digits-swin") == "digits-swin"
    assert all(timm.is_model_pretrained(name) for name in classifiers.PAPER_MODELS.values())
    assert top1._resolve_models(["all", "DeiT-T"]) == list(classifiers.PAPER_MODELS)
    with pytest.raises(ValueError, match=r"ViT-S.*digits-vit.*'swin_tinny'"):
        classifiers.resolve_model_name("swin_tinny")


def test_refusals(folder: Path, weights: Path, tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (ValueError, r"give pretrained \(--pretrained\) or a weights file \(--weights\)", MODEL, {"data": folder}),
        (ValueError, "exclude", MODEL, {"data": folder, "weights": weights, "pretrained": True}),
        (FileNotFoundError, "weights", MODEL, {"data": folder, "weights": tmp_path / "none.pth"}),
        (FileNotFoundError, "data", MODEL, {"data": tmp_path / "none", "weights": weights}),
        (ValueError, "image folder", MODEL, {"weights": weights}),
        (ValueError, "one folder of images per class", MODEL, {"data": tmp_path, "weights": weights}),
        (ValueError, "scikit-learn's digits", "digits-vit", {"data": folder}),
        (OSError, "t10k|train-images", "fashion-vit", {"data": folder}),
        (ValueError, "comes with its weights", "digits-vit", {"pretrained": True}),
        (ValueError, "method", "digits-vit", {"methods": ["magic"]}),
        (ValueError, "batch must be at least 1", "digits-vit", {"batch": 0}),
        (ValueError, "workers must be at least 0", "digits-vit", {"workers": -1}),
        (ValueError, "dtype must be one of", "digits-vit", {"dtype": "float64"}),
        (ValueError, "device must be", "digits-vit", {"device": "gpu"}),
    ]
    for error, match, model, options in cases:
        with pytest.raises(error, match=match):
            run([model], options.pop("methods", QUICK), output=tmp_path / "out", **options)
    with pytest.raises(ValueError, match="one model"):
        run(["digits-vit", "digits-swin"], QUICK, weights=weights)
    with pytest.raises(ValueError, match="at least one model"):
        run([], QUICK)


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def fake(models: list[str], methods: list[str], **options: Any) -> None:
        calls.append((models, methods, options["subset"], options["dtype"], options["output"]))
        if options["pretrained"]:
            raise ValueError("no network")

    monkeypatch.setitem(sys.modules, "qflash_lab.evaluation.top1", types.SimpleNamespace(run_evaluate=fake))
    runner = CliRunner()
    arguments = ["evaluate", "--model", "ViT-S", "--model", "DeiT-T", "--subset", "9", "--output", str(tmp_path)]
    assert runner.invoke(app, arguments).exit_code == 0
    assert calls == [(["ViT-S", "DeiT-T"], ["all"], 9, "float32", tmp_path)]
    result = runner.invoke(app, [*arguments, "--method", "fp32", "--pretrained"])
    assert result.exit_code == 1
    assert "no network" in result.output
    assert calls[1][1] == ["fp32"]
    assert runner.invoke(app, ["evaluate"]).exit_code == 2


def test_the_digest_is_of_the_whole_package(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.append(path)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    top1._source_digest.__wrapped__()
    package = Path(qflash.__file__).parent
    assert {package / "api.py", package / "kernels" / "dispatch.py", Path(top1.__file__)} <= set(read)


@pytest.mark.slow
def test_integer_networks_of_image_folders(folder: Path, weights: Path, tmp_path: Path) -> None:
    """Calibrated on images that are not judged; a list of images gives the same."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("*/*.png"))]
    listed = folder / "list.txt"
    listed.write_text("".join(f"{name} {CLASSES.index(name.partition('/')[0])}\n" for name in names))
    report, printed = run([MODEL], ["fp32"], data=listed, weights=weights, output=tmp_path / "out", integer=True, calibration=6)
    (result,) = report["models"]
    rows = {row["method"]: row for row in result["methods"]}
    assert list(rows) == ["fp32", "integer-default", "integer-accurate"]
    assert result["images"] == 9 and result["run"]["calibration_images"] == 6 and "integer-accurate" in printed
    judged = [outcome.id for outcome in load_outcomes(tmp_path / "out" / MODEL / "integer-default.csv")]
    assert len(set(judged)) == 9 and set(judged) < set(names)
    for name in ("integer-default", "integer-accurate"):
        assert rows[name]["logits_sqnr_db"] > 20 and rows[name]["sqnr_images"] == 9 and rows[name]["top5_percent"] == 100.0
        assert rows[name]["calibration_images"] == 6 and rows[name]["against_fp32"]["same_prediction_percent"] >= 75
    (_, one), (_, other) = (load_classifier(MODEL, data, weights=weights) for data in (folder, listed))
    assert list(one.ids) == list(other.ids) and one.labels == other.labels
    assert all(torch.equal(one.dataset[place][0], other.dataset[place][0]) for place in (0, 14))
    # what the networks take is what the file holds, before it is normalised
    config = one.identity["preprocessing"]
    pixels = pixels_of(one.dataset[3][0], config["mean"], config["std"])
    again = (pixels / 255 - torch.tensor(config["mean"]).view(3, 1, 1)) / torch.tensor(config["std"]).view(3, 1, 1)
    torch.testing.assert_close(again, one.dataset[3][0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"calibration": 15}, "data must hold more than the 15 images to calibrate on, got 15"),
        ({"calibration": 1}, "calibration must be at least 2"),
        ({"dtype": "bfloat16"}, "pixels do not fit bfloat16"),
    ],
)
def test_integer_networks_that_cannot_be(
    options: dict[str, Any], words: str, folder: Path, weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        run([MODEL], ["fp32"], data=folder, weights=weights, output=tmp_path, integer=True, **options)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", ValueError, "lists no images"),
        ("ant/0.png\n", ValueError, "line 1 of list.txt must be a path and a class number"),
        ("ant/0.png zero\n", ValueError, "must be a path and a class number"),
        ("ant/0.png 0\nant/9.png 0\n", FileNotFoundError, "line 2 of list.txt names 'ant/9.png', which is not there"),
        ("ant/0.png 7\n", ValueError, "weights must hold this model's parameters"),
    ],
)
def test_lists_that_are_refused(
    text: str, error: type[Exception], words: str, folder: Path, weights: Path, tmp_path: Path
) -> None:
    draw_images(tmp_path, ("ant",), 1)
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(error, match=words):
        load_classifier(MODEL, tmp_path / "list.txt", weights=weights)


def test_rows_of_integer_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_models, "CALIBRATION", 8)
    report, printed = run(["digits-vit"], ["qflash-default"], output=tmp_path, subset=10, integer=True)
    result = report["models"][0]
    rows = {summary["method"]: summary for summary in result["methods"]}
    assert list(rows) == ["fp32", "qflash-default", "integer-default", "integer-accurate"]
    for name in ("integer-default", "integer-accurate"):
        assert rows[name]["integer_only"] and rows[name]["right"] >= 9
        assert {"lost", "gained", "mcnemar_p", "loss_change"} <= rows[name]["against_fp32"].keys()
        assert rows[name]["against_fp32"]["loss_change"] > rows["qflash-default"]["against_fp32"]["loss_change"]
        assert (tmp_path / "digits-vit" / f"{name}.csv").is_file()
    assert {pair["second"] for pair in result["pairs"]} == {"qflash-default", "integer-default", "integer-accurate"}
    assert rows["fp32"]["network_gbops"] == pytest.approx(16 * rows["integer-default"]["network_gbops"])
    assert "network_gbops" not in rows["qflash-default"]
    assert rows["integer-accurate"]["gbops"] == pytest.approx(1.5 * rows["integer-default"]["gbops"])
    assert "of the whole network" in printed and "integer-accurate" in printed
    # whole networks are no attention methods
    assert result["integer_only"]["best"] == ["qflash-default"]

    # what the rows say is what quantize_model gives, on digits that are not judged
    model, images = load_classifier("digits-vit", classifiers.SHIPPED)
    train = small_models.calibration_images("digits")
    network = qflash.quantize_model(model.backbone, [model.pixels(train)], mean=(0.5,), std=(0.5,), progress=False)
    outcomes = load_outcomes(tmp_path / "digits-vit" / "integer-default.csv")
    judged = torch.stack([images.dataset[outcome.index][0] for outcome in outcomes])
    assert network(model.pixels(judged)).argmax(1).tolist() == [outcome.predictions[0] for outcome in outcomes]
    assert not any(torch.equal(a, b) for a in judged for b in train)

    before = per_image(tmp_path)
    assert run(["digits-vit"], ["qflash-default"], output=tmp_path, subset=10, integer=True)[0]["models"] == report["models"]
    assert per_image(tmp_path) == before
    with pytest.raises(ValueError, match=r"data must be a folder or a list of images for integer networks of DeiT-T"):
        run(["digits-vit", "DeiT-T"], integer=True)
