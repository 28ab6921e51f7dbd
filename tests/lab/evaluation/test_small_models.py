"""The shipped models: they load, have the paper's shapes, and keep their accuracy in integers. Also their images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qflash
from helpers import slow, write_fashion
from qflash_lab.bench.workloads import get_workload

pytest.importorskip("timm")
pytest.importorskip("sklearn")
from qflash.integrations import adapter
from qflash_lab.evaluation import small_models
from qflash_lab.evaluation.integer_rows import WHOLE_NETWORKS
from qflash_lab.evaluation.real_data import DataUnavailableError

WORKLOADS = {
    "digits-vit": ("A1",) * 2,
    "digits-swin": ("A6", "A6", "A7"),
    "fashion-vit": ("A1",) * 4,
    "fashion-swin": ("A5", "A5", "A6", "A6", "A7"),
}
FLOAT_IMAGES, IMAGES = 192, 48


def test_digits_are_seeded_stratified_and_disjoint() -> None:
    split = small_models.load_digits_split()
    assert split.train_images.shape == (1257, 1, 8, 8)
    assert split.images.shape == (540, 1, 8, 8)
    assert split.train_images.dtype == torch.float32
    assert split.train_labels.dtype == torch.int64
    assert split.train_images.min() == 0.0
    assert split.train_images.max() == 1.0
    share = split.labels.bincount() / (split.train_labels.bincount() + split.labels.bincount())
    assert (share - 0.3).abs().max() < 0.01
    again = small_models.load_images("digits")
    assert all(torch.equal(a, b) for a, b in zip(vars(split).values(), vars(again).values(), strict=True))
    assert not torch.equal(small_models.load_digits_split(seed=1).labels, split.labels)


def test_shipped_fashion_images() -> None:
    split = small_models.load_images("fashion")
    assert split.images.shape == (500, 1, 28, 28)
    assert split.images.dtype == torch.float32 and split.labels.dtype == torch.int64
    assert split.labels.bincount().tolist() == [50] * 10
    assert split.train_images.shape == (small_models.CALIBRATION, 1, 28, 28)
    assert set(split.train_labels.bincount().tolist()) == {6, 7}
    assert torch.equal(small_models.calibration_images("fashion"), split.train_images)
    # integer networks get the bytes of the files
    model = small_models.build_model("fashion-vit")
    assert torch.equal(model.pixels(split.images), (split.images * 255).round().to(torch.uint8))


def test_a_folder_of_idx_files(tmp_path: Path) -> None:
    split = small_models.load_images("fashion", write_fashion(tmp_path, 6, 4))
    assert (len(split.train_images), split.images.shape, split.labels.tolist()) == (6, (4, 1, 28, 28), [0, 1, 2, 3])
    assert 0.9 < split.images.max() <= 1.0
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataUnavailableError, match="t10k-labels-idx1-ubyte"):
        small_models.load_images("fashion", tmp_path)
    with pytest.raises(DataUnavailableError, match="qflash-lab evaluate --data"):
        small_models.load_images("fashion", tmp_path / "none")


@pytest.mark.parametrize("name", small_models.MODELS)
def test_attention_shapes_are_the_papers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        shapes.append(tuple(query.flatten(0, -4).shape))
        return torch.zeros_like(query)

    monkeypatch.setattr(adapter, "attention", spy)
    spec = small_models.MODELS[name]
    qflash.patch(small_models.build_model(name).eval())(torch.zeros(2, *spec.image_shape))
    assert shapes == [get_workload(workload).shape(2) for workload in WORKLOADS[name]]


@torch.no_grad()
@pytest.mark.parametrize(
    # the demo's test looks at Fashion-MNIST's in all three forms
    ("name", "least"),
    [("digits-vit", 0.97), ("digits-swin", 0.97), slow("fashion-vit", 0.9), slow("fashion-swin", 0.9)],
)
def test_accuracy_in_float_and_in_integers(name: str, least: float) -> None:
    split = small_models.load_images(small_models.MODELS[name].dataset)
    model = small_models.load_model(name)
    assert not model.training
    exact = small_models.predict_logits(model, split.images[:FLOAT_IMAGES]).argmax(1)
    assert (exact == split.labels[:FLOAT_IMAGES]).float().mean() >= least
    got = small_models.predict_logits(qflash.patch(model), split.images[:IMAGES], batch=32).argmax(1)
    assert (got != exact[:IMAGES]).sum() <= 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["fashion-vit", slow("fashion-swin")])
def test_accuracy_of_the_whole_integer_network(name: str) -> None:
    split = small_models.load_images("fashion")
    images, labels = split.images[:FLOAT_IMAGES], split.labels[:FLOAT_IMAGES]
    model = small_models.load_model(name)
    exact = small_models.predict_logits(model, images).argmax(1)
    got = small_models.predict_logits(WHOLE_NETWORKS[0].build(model), images).argmax(1)
    assert abs(int((got == labels).sum()) - int((exact == labels).sum())) <= 2
    assert (got != exact).sum() <= 4


def test_unknown_names() -> None:
    for function in (small_models.build_model, small_models.load_model):
        with pytest.raises(ValueError, match="digits-vit"):
            function("resnet")
    with pytest.raises(ValueError, match="digits, fashion"):
        small_models.load_images("cifar")
    with pytest.raises(ValueError, match="folder must be None for digits"):
        small_models.load_images("digits", Path("."))
