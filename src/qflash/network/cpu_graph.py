"""A network's forward pass on the CPU as one call of C: :meth:`.graph.IntegerNetwork.graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .inputs import check_input, input_shape, takes_ids

if TYPE_CHECKING:
    from ..kernels.cpu.plan import Plan


def make_plan(network: Any, batch: int) -> tuple[Plan, torch.Tensor]:
    """Run a network once and note the calls of C; return them, and the images that they take.

    Raises:
        ValueError: the network is not on the CPU, or a node has no C kernel; the message names it.
        RuntimeError: there are no C kernels on this machine.
    """
    from ..backends import find_backend
    from ..kernels.cpu import launch
    from ..kernels.cpu.backend import CpuBackend
    from ..kernels.cpu.plan import Plan

    device = next(network.buffers()).device
    if not isinstance(find_backend(network.backend, device), CpuBackend):
        raise ValueError(f"network must run on the back end 'cpu', runs on {device} with the back end {network.backend!r}")
    if takes_ids(network.image):
        raise ValueError("a network that takes ids of tokens has no C kernel that looks these up")
    images = torch.randint(0, 256, (batch, *input_shape(network.image)), dtype=torch.uint8, device="cpu")
    written: set[int] = set()

    def look(name: str, out: torch.Tensor) -> None:
        written.update(x.untyped_storage().data_ptr() for call in calls for x in call.tensors if x is not None)
        if out.untyped_storage().data_ptr() not in written:
            raise ValueError(f"{name}, of type {type(network.part(name)).__name__}, has no C kernel")

    with torch.inference_mode(False), torch.no_grad(), launch.noted_calls() as calls:
        outputs = {name: x.contiguous() for name, x in network.run(images, look).items()}
    return Plan(calls, images, outputs), images


class CpuGraph:
    """A forward pass for one batch size as one call of C, with weights that are packed once and memory that is reserved once.

    Calls from several threads wait for each other.

    Attributes:
        batch: images a call.
    """

    def __init__(self, network: Any, batch: int) -> None:
        """Note the calls, and compare them with the layers; see :meth:`.graph.IntegerNetwork.graph`."""
        from ..kernels.cpu.plan import Runner

        plan, images = make_plan(network, batch)
        self.batch = batch
        self._image = network.image
        self._runner = Runner(plan, images)
        # other numbers than the calls were noted with: nothing of these may have stayed
        other = images ^ 255
        with torch.no_grad():
            wanted, found = network.run(other), self._runner(other)
        if wrong := [name for name, x in wanted.items() if not torch.equal(found[name], x)]:
            raise RuntimeError(f"the noted calls give another {wrong[0]} than the layers; please report this network")

    def __call__(self, images: torch.Tensor) -> Any:
        """Return new tensors with what the network makes of uint8 images (batch, channels, height, width).

        Raises:
            TypeError, ValueError: images are of another type or size, or not :attr:`batch` many.
            MemoryError: there is too little.
        """
        check_input(images, self._image)
        if len(images) != self.batch:
            raise ValueError(f"images must be a batch of {self.batch}, for which the graph was made, got {len(images)}")
        out = self._runner(images)
        return out if len(out) > 1 else next(iter(out.values()))
