"""The shipped digits models: they load, have the paper's shapes, and keep their accuracy in integers."""

from __future__ import annotations

import pytest
import torch

import qflash
from qflash.bench.workloads import get_workload

pytest.importorskip("timm")
pytest.importorskip("sklearn")
from qflash.evaluation import digits
from qflash.integrations import adapter

FLOAT_IMAGES, IMAGES = 192, 48


@pytest.fixture(scope="module")
def split() -> tuple[torch.Tensor, ...]:
    return digits.load_digits_split()


def test_split_is_seeded_stratified_and_disjoint(split: tuple[torch.Tensor, ...]) -> None:
    images, labels, test_images, test_labels = split
    assert images.shape == (1257, 1, 8, 8)
    assert test_images.shape == (540, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.min() == 0.0
    assert images.max() == 1.0
    share = test_labels.bincount() / (labels.bincount() + test_labels.bincount())
    assert (share - 0.3).abs().max() < 0.01
    assert all(torch.equal(a, b) for a, b in zip(split, digits.load_digits_split(), strict=True))
    assert not torch.equal(digits.load_digits_split(seed=1)[3], test_labels)


@pytest.mark.parametrize(("name", "workloads"), [("vit", ("A1", "A1")), ("swin", ("A6", "A6", "A7"))])
def test_attention_shapes_are_the_papers(name: str, workloads: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        shapes.append(tuple(query.flatten(0, -4).shape))
        return torch.zeros_like(query)

    monkeypatch.setattr(adapter, "attention", spy)
    qflash.patch(digits.build_model(name).eval())(torch.zeros(2, 1, 8, 8))
    assert shapes == [get_workload(workload).shape(2) for workload in workloads]


@torch.no_grad()
@pytest.mark.parametrize("name", digits.MODELS)
def test_accuracy_in_float_and_in_integers(name: str, split: tuple[torch.Tensor, ...]) -> None:
    _, _, images, labels = split
    model = digits.load_model(name)
    assert not model.training
    exact = digits.predict_logits(model, images[:FLOAT_IMAGES]).argmax(1)
    assert (exact == labels[:FLOAT_IMAGES]).float().mean() >= 0.97
    got = digits.predict_logits(qflash.patch(model), images[:IMAGES], batch=32).argmax(1)
    lost = (exact[:IMAGES] == labels[:IMAGES]).float().mean() - (got == labels[:IMAGES]).float().mean()
    assert abs(lost) <= 0.01


def test_unknown_model() -> None:
    for function in (digits.build_model, digits.load_model):
        with pytest.raises(ValueError, match="vit"):
            function("resnet")
