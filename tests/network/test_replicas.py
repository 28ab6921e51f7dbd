"""``nn.DataParallel`` of integer networks: what it broadcasts, with two GPUs that are not there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import comm, replicate

from helpers import few
from qflash.network.modules import PatchEmbedding
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


@pytest.mark.parametrize("kind", few(KINDS, 3))
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


def test_embeddings_are_loaded_as_words(made: Any) -> None:  # noqa: F811
    model, network = made("registers")
    state = network.state_dict()
    words = [f"parts.patch_embed.proj.{name}_words" for name in ("position", "prefix")]
    assert [(state[name].dtype, state[name].numel()) for name in words] == [(torch.int32, 16 * 24), (torch.int32, 4 * 24)]
    embed = network.part("patch_embed.proj")
    assert embed.position.shape == (1, 16, 48) and embed.prefix.shape == (1, 4, 48) and embed.prefix.dtype == torch.int16
    images = draw(model, 2, seed=3)
    want = network(images)
    for assign in (False, True):
        other = copy.deepcopy(network)
        other.part("patch_embed.proj").position.zero_()
        assert not torch.equal(other(images), want)
        given = {name: x.clone() for name, x in state.items()}
        assert other.load_state_dict(given, assign=assign).missing_keys == []
        assert torch.equal(other(images), want)


@pytest.mark.parametrize("name", ["position", "prefix"])
def test_embeddings_that_do_not_fit_are_refused(name: str, made: Any) -> None:  # noqa: F811
    network = copy.deepcopy(made("registers")[1])
    state = network.state_dict()
    key = f"parts.patch_embed.proj.{name}_words"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"tensors \['patch_embed\.proj\.{name}_words'\] are missing"):
            network.load_state_dict({each: x for each, x in state.items() if each != key}, strict=strict)
    for wrong in (state[key][:1], state[key].float()):
        with pytest.raises(RuntimeError, match=rf"{name}_words must be torch\.int32 \("):
            network.load_state_dict({**state, key: wrong})


def test_an_odd_number_of_embeddings() -> None:
    embed = PatchEmbedding(3, (2, 2), 9, 9, 1)
    values = torch.arange(81, dtype=torch.int16).view(1, 9, 9)
    embed.position.copy_(values)  # type: ignore[union-attr]
    assert torch.equal(embed.position, values) and embed.prefix.shape == (1, 1, 9)  # type: ignore[arg-type, union-attr]
    assert embed.position_words.numel() == 41 and embed.prefix_words.numel() == 5  # type: ignore[union-attr]
