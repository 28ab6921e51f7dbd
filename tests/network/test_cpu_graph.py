"""A forward pass on the CPU as one call of C: the bits of the layers, for every kind of network."""

from __future__ import annotations

import copy
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import qflash
from allocations import COUNTER
from helpers import few
from qflash.kernels.cpu import launch
from qflash.network.modules import Linear
from small_networks import KINDS, draw


@pytest.mark.parametrize("kind", few(KINDS, 4))
@pytest.mark.parametrize("batch", [1, 3])
def test_a_graph_has_the_bits_of_the_layers(made: Any, kind: str, batch: int) -> None:
    model, network = made(kind)
    run = network.graph(batch)
    for seed in (5, 6):
        images = draw(model, batch, seed=seed)
        assert torch.equal(run(images), network(images))


def test_outputs_are_new_and_images_may_be_views(made: Any) -> None:
    model, network = made("class token")
    run = network.graph(2)
    images = draw(model, 4, seed=3)
    first = run(images[::2])
    kept = first.clone()
    second = run(images[1::2].contiguous(memory_format=torch.channels_last))
    assert torch.equal(first, kept) and torch.equal(first, network(images[::2]))
    assert torch.equal(second, network(images[1::2]))


def test_several_outputs_have_their_names(made: Any) -> None:
    model, _ = made("class token")

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            tokens = self.model.forward_features(images)
            return {"logits": self.model.forward_head(tokens), "tokens": tokens}

    images = draw(model, 24)
    network = qflash.quantize_model(
        Both().eval(), [images], mean=[0.5] * 3, std=[0.5] * 3, outputs=["logits", "tokens"], progress=False
    )
    found, wanted = network.graph(2)(images[:2]), network(images[:2])
    assert found.keys() == wanted.keys() == {"logits", "tokens"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_threads_take_turns_and_graphs_do_not_share(made: Any) -> None:
    model, network = made("swin")
    runs = [network.graph(1), network.graph(1)]
    images = draw(model, 8, seed=9)
    wanted = network(images)
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        found[number] = runs[number % 2](images[number : number + 1])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(found[number][0], wanted[number]) for number in range(8))


def test_arrays_share_memory_when_they_are_done(made: Any) -> None:
    """A network twice as deep needs no more memory for activations."""
    from qflash.network.cpu_graph import make_plan

    _, network = made("class token")
    plan, _ = make_plan(network, 2)
    arrays = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for call in plan.calls
        for x in call.tensors
        if x is not None and x is call.tensors[_out(call)]
    }
    assert plan.arena_bytes < sum(arrays.values()) / 2


def _out(call: launch.Call) -> int:
    return call.pointers.index("out")


def test_packed_weights_are_the_layers(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """Several threads and one pack the same weights, and read them."""
    model, network = made("class token")
    images = draw(model, 2, seed=4)
    wanted = network(images)
    for threads in (1, 3):
        monkeypatch.setattr(launch, "threads_for", lambda work, threads=threads: threads)
        assert torch.equal(network.graph(2)(images), wanted)


def test_a_node_outside_of_the_kernels_is_named(made: Any) -> None:
    model, network = made("class token")
    part = qflash.quantize_model(model, [draw(model, 24)], keep_float=["blocks.0.mlp"], progress=False)
    with pytest.raises(ValueError, match=r"blocks.0.norm2, of type FloatNode, has no C kernel"):
        part.graph(1)
    reference = copy.deepcopy(network)
    reference.backend = "reference"
    with pytest.raises(ValueError, match="network must run on the back end 'cpu', runs on cpu with the back end 'reference'"):
        reference.graph(1)


@pytest.mark.parametrize(
    ("images", "error", "words"),
    [
        (
            torch.zeros(3, 3, 24, 24, dtype=torch.uint8),
            ValueError,
            "images must be a batch of 2, for which the graph was made, got 3",
        ),
        (torch.zeros(2, 3, 24, 24), TypeError, "images must be uint8 pixels, 0 to 255"),
    ],
)
def test_images_are_checked(made: Any, images: torch.Tensor, error: type[Exception], words: str) -> None:
    _, network = made("class token")
    side = network.image[1]
    with pytest.raises(error, match=words):
        network.graph(2)(images[..., :1, :1].expand(-1, -1, side, side))


def test_a_call_that_fails_raises(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that stay from the first run are noticed before a graph is given out."""
    _, network = made("class token")
    forward = Linear.forward
    stale: dict[int, torch.Tensor] = {}

    def remembers(self: Linear, *given: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        out = forward(self, *given, backend=backend)
        # a copy that no call of C makes
        return stale.setdefault(id(self), out.clone()) if self.bias.numel() == 10 and id(self) not in stale else out

    monkeypatch.setattr(Linear, "forward", remembers)
    with pytest.raises(ValueError, match="head, of type Linear, has no C kernel"):
        network.graph(1)


COUNT = """
import ctypes, sys, torch, qflash
from qflash.kernels.cpu.launch import load
counter = ctypes.CDLL(sys.argv[1])
for threads in (1, 2):
    torch.set_num_threads(threads)
    run = qflash.load_model(sys.argv[2]).graph(2)._runner
    run._run(run._calls, ctypes.byref(run._count))
    print(counter.allocations_of(load().qflash_run, run._calls, ctypes.byref(run._count)))
print(counter.allocations_of(load().qflash_run, None, ctypes.byref(ctypes.c_int64(0))), counter.allocations() > 1000)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's names of its allocator")
def test_a_run_allocates_nothing(made: Any, tmp_path: pathlib.Path) -> None:
    """With one thread, and with two once OpenMP has them."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    source, library, network = tmp_path / "counter.c", tmp_path / "counter.so", tmp_path / "network.safetensors"
    source.write_text(COUNTER, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    made("class token")[1].save(network)
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(library), str(network)], env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0\n0\n0 True\n"), done.stderr
