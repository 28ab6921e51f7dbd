"""A network's forward pass as a CUDA graph: :meth:`.graph.IntegerNetwork.graph`."""

from __future__ import annotations

from typing import Any

import torch

from .inputs import check_input, input_dtype, input_shape

WARM_UP = 3
"""Forward passes before the capture, in which kernels are compiled."""


class NetworkGraph:
    """A captured forward pass for one batch size: no launch costs, and memory that is reserved once.

    Not for several threads or streams at once: calls share one input and one output. It may be made inside or outside of
    inference mode and called in the other; what a call returns is of the mode it is made in.

    Attributes:
        batch: images a call.
    """

    def __init__(self, network: Any, batch: int) -> None:
        """Warm up and capture; see :meth:`.graph.IntegerNetwork.graph`."""
        device = next(network.buffers()).device
        self.batch = batch
        # kept alive, as is what the graph reads
        self._network = network
        # every call writes to the input, also outside of an inference mode that is on now
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            self._images = torch.zeros((batch, *input_shape(network.image)), dtype=input_dtype(network.image), device=device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    network(self._images)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # PyTorch's own stream for captures is of the GPU that was the current one in the first capture
            with torch.cuda.graph(self._graph, stream=side):
                self._output = network(self._images)

    def __call__(self, images: Any = None, **text: torch.Tensor | None) -> Any:
        """Return new tensors with what the network makes of images or texts, of any device.

        Args:
            images: as :meth:`.graph.IntegerNetwork.forward` takes them.
            text: ``input_ids``, ``attention_mask`` and ``token_type_ids``, as it takes them, of the tokens of calibration.

        Raises:
            TypeError, ValueError: images are of another type or size, or not :attr:`batch` many.
        """
        images = self._network.prepared(images, **text)
        check_input(images, self._network.image)
        if len(images) != self.batch:
            raise ValueError(f"images must be a batch of {self.batch}, for which the graph was captured, got {len(images)}")
        self._images.copy_(images)
        self._graph.replay()
        out = self._output
        return {name: x.clone() for name, x in out.items()} if isinstance(out, dict) else out.clone()
