"""What ``qflash coverage`` finds by computing: networks that equal their models, and what does not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers import few, slow
from qflash.network.coverage import drawn_images, network_coverage
from qflash.network.quantize import find_statistics
from small_networks import build

STATISTICS = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def test_a_network_is_computed_beside_its_model() -> None:
    model = build("vit", num_classes=10)
    found = network_coverage(model, (3, 32, 32), statistics=STATISTICS)
    assert found.refusals == () and found.nodes["Attention"] == 2 and found.outputs == {"output": (10,)}
    assert found.captured_db is not None and found.captured_db > 90
    assert found.quality is not None and found.quality.sqnr_db > 20
    assert found.quality.images == len(drawn_images((3, 8, 8))) == 4
    traced = network_coverage(model, (3, 32, 32))
    assert traced == dataclasses.replace(found, captured_db=None, quality=None)


class _Otherwise(nn.Module):
    """Does something else where it is traced, or fails where it runs."""

    def __init__(self, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.change = build("vit", num_classes=10), change
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.model(x), torch.compiler.is_compiling())


def _fails(x: torch.Tensor, traced: bool) -> torch.Tensor:
    if not traced:
        raise RuntimeError("out of patience")
    return x


def _same(x: torch.Tensor, traced: bool) -> torch.Tensor:
    return x if traced else x.mean(dim=0, keepdim=True).expand(x.shape)


OTHERWISE: dict[str, tuple[Any, str]] = {
    "twice as much": (lambda x, traced: x if traced else 2 * x, "computes something that conversion does not know"),
    "a failure": (_fails, "^computed on 4 drawn images: RuntimeError: out of patience"),
    "one output": (_same, "computes something that conversion does not know"),
    "NaN": (lambda x, traced: x if traced else x + torch.nan, "NaN or infinity in the output of the float network"),
}


@pytest.mark.parametrize("case", ["twice as much", *map(slow, list(OTHERWISE)[1:])])
def test_what_computes_something_else_is_no_network(case: str) -> None:
    change, message = OTHERWISE[case]
    model = _Otherwise(change)
    assert network_coverage(model, (3, 32, 32)).refusals == ()
    found = network_coverage(model, (3, 32, 32), statistics=STATISTICS)
    (reason,) = found.refusals
    assert re.search(message, reason) and found.nodes == found.outputs == {}


def test_what_has_16_bits_is_compared_in_float32() -> None:
    found = network_coverage(build("vit", num_classes=10).bfloat16(), (3, 32, 32), statistics=STATISTICS)
    assert found.captured_db is not None and found.captured_db > 90


def test_statistics_of_other_channels_are_no_refusal() -> None:
    with pytest.raises(ValueError, match="mean must be 3 numbers"):
        network_coverage(build("vit", num_classes=10), (3, 32, 32), statistics=((0.5,) * 2, (0.5,) * 2))


def test_statistics_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def find(*args: Any) -> Any:
        found.append(args)
        return find_statistics(*args)

    for module in ("coverage", "quantize"):
        monkeypatch.setattr(f"qflash.network.{module}.find_statistics", find)
    assert network_coverage(build("vit", num_classes=10), (3, 32, 32), statistics=STATISTICS).quality is not None
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the integer network")
def test_integers_that_are_far_from_the_model_are_no_network() -> None:
    """Channels of one layer that differ by far more than 8 bits hold leave little of a network."""
    model = build("vit", num_classes=10)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc2.weight[::2] *= 3e4
            block.mlp.fc2.weight[1::2] *= 1e-2
    (reason,) = network_coverage(model, (3, 32, 32), statistics=STATISTICS).refusals
    assert "less than min_sqnr=10" in reason and "Most is lost in blocks." in reason


class _Also(nn.Module):
    """Returns the logits and something else."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.other = build("vit", num_classes=10), other
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.model(x)
        return y, self.other(y)


SHAPES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "one number an image": (lambda y: y.argmax(-1), r"^aten.argmax in the model .*; outputs=\['output0'\] leaves it out$"),
    "one number": (lambda y: y.mean(), r"^mean of everything in the model .*; outputs=\['output0'\] leaves it out$"),
    "an element": (lambda y: y[0, 0], r"^output 'output1' must have the batch first, has shape \(\)$"),
    "a row of one image": (
        lambda y: nn.functional.linear(y[0], torch.ones(2, 10)),
        r"^output 'output1' must have the batch first, has shape \(2\)$",
    ),
}


@pytest.mark.parametrize("name", few(SHAPES, 3))
def test_outputs_of_fewer_dimensions_are_refusals(name: str) -> None:
    other, message = SHAPES[name]
    (reason,) = network_coverage(_Also(other), (3, 32, 32)).refusals
    assert re.search(message, reason)
