"""``nn.DataParallel`` of integer networks: what it broadcasts, with two GPUs that are not there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import comm, replicate

import qflash
from small_networks import KINDS, draw, made  # noqa: F401 - a fixture

NCCL = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32)
"""What it broadcasts, of the types that networks could have."""


def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int = 0) -> list[list[torch.Tensor]]:
    """Do what PyTorch does on GPUs: tensors of one type lie one behind the other in one copy."""
    assert all(x.dtype in NCCL for x in tensors), "Unconvertible NCCL type"
    copies = [list(tensors)]
    for _ in devices[1:]:
        places: list[Any] = [None] * len(tensors)
        for dtype in {x.dtype for x in tensors}:
            own = [number for number, x in enumerate(tensors) if x.dtype == dtype]
            whole = torch.cat([tensors[number].flatten() for number in own])
            parts = whole.split([tensors[number].numel() for number in own])
            for number, part in zip(own, parts, strict=True):
                places[number] = part.view(tensors[number].shape)
        copies.append(places)
    return copies


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_have_the_bits_of_the_network(kind: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(comm, "broadcast_coalesced", broadcast)
    model, network = made(kind)
    images = draw(model, 2, seed=3)
    want = network(images)
    # by itself, and as a part of something larger
    with torch.no_grad():
        for whole in (network, torch.nn.Sequential(network)):
            replicas = replicate(whole, [0, 1], detach=True)
            assert all(torch.equal(replica(images), want) for replica in replicas)


def test_embeddings_are_kept_as_before(made: Any) -> None:  # noqa: F811
    model, network = made("registers")
    state = network.state_dict()
    assert list(state)[:2] == ["position", "prefix"] and not any("words" in name for name in state)
    assert [state[name].dtype for name in ("position", "prefix")] == [torch.int16] * 2
    assert state["position"].shape == (1, 16, 48) and state["prefix"].shape == (1, 4, 48)
    images = draw(model, 2, seed=3)
    want = network(images)
    for assign in (False, True):
        other = copy.deepcopy(network)
        other.position.zero_()
        other.prefix.zero_()
        assert not torch.equal(other(images), want)
        given = {name: x.clone() for name, x in state.items()}
        assert other.load_state_dict(given, assign=assign).missing_keys == []
        assert torch.equal(other(images), want)
        given["position"].zero_()
        assert torch.equal(other(images), want)


@pytest.mark.parametrize("name", ["position", "prefix"])
def test_embeddings_that_do_not_fit_are_refused(name: str, made: Any) -> None:  # noqa: F811
    network = copy.deepcopy(made("registers")[1])
    state = network.state_dict()
    without = {key: x for key, x in state.items() if key != name}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"tensors \['{name}'\] are missing"):
            network.load_state_dict(without, strict=strict)
    for wrong in (state[name][:, :1], state[name].float()):
        with pytest.raises(RuntimeError, match=rf"{name} must be torch\.int16 \("):
            network.load_state_dict({**state, name: wrong})


def test_an_odd_number_of_embeddings() -> None:
    from qflash.network.models import VisionTransformer, VisionTransformerShape

    shape = VisionTransformerShape((6, 6), (2, 2), 3, 9, 1, 1, 9, 9, 1, "token", 3, False, 0.3, qflash.DEFAULT.key)
    network = VisionTransformer(shape)
    values = torch.arange(81, dtype=torch.int16).view(1, 9, 9)
    network.position.copy_(values)
    attention = network.blocks[0].attn
    for scale in (attention.query_scale, attention.key_scale, attention.value_scale, attention.output_scale):
        # the bits of 1.0
        scale.fill_(0x3F800000)
    other = VisionTransformer(shape)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other.position, values) and other.prefix.shape == (1, 1, 9)
