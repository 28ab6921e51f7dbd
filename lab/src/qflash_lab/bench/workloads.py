"""The attention shapes of the paper's Table 1 and the inputs it measures them on."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of Table 1: the shape of one attention layer for one image.

    Attributes:
        name: the paper's label, ``"A1"`` to ``"A7"``.
        source: the models and the stage the shape is taken from.
        windows: attention windows per image; they act as a factor of the batch (1 for ViT).
        heads: attention heads.
        tokens: tokens per window, for queries and keys alike.
        head_dim: channels per head.
    """

    name: str
    source: str
    windows: int
    heads: int
    tokens: int
    head_dim: int

    def shape(self, batch: int) -> tuple[int, int, int, int]:
        """Return the shape of query, key and value for ``batch`` images.

        Returns:
            ``(batch * windows, heads, tokens, head_dim)``.

        Raises:
            ValueError: ``batch`` is not positive.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        return (batch * self.windows, self.heads, self.tokens, self.head_dim)


WORKLOADS = (
    Workload("A1", "ViT-T, DeiT-T", 1, 3, 197, 64),
    Workload("A2", "ViT-S, DeiT-S", 1, 6, 197, 64),
    Workload("A3", "ViT-B, DeiT-B", 1, 12, 197, 64),
    Workload("A4", "Swin-T, Swin-S, stage 1", 64, 3, 49, 32),
    Workload("A5", "Swin-T, Swin-S, stage 2", 16, 6, 49, 32),
    Workload("A6", "Swin-T, Swin-S, stage 3", 4, 12, 49, 32),
    Workload("A7", "Swin-T, Swin-S, stage 4", 1, 24, 49, 32),
)
"""Table 1, in its order."""


def get_workload(name: str) -> Workload:
    """Return the workload called ``name``.

    Raises:
        ValueError: no workload has that name.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    raise ValueError(f"name must be one of {[w.name for w in WORKLOADS]}, got {name!r}")


def add_outliers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Make a query channel loud and shift two key channels and a value channel, in place.

    Args:
        query, key, value: (..., channels), at least 8 channels.
    """
    query[..., 3] *= 8
    key[..., 3] += 12
    key[..., 7] -= 9
    value[..., 5] += 4


def paper_inputs(
    workload: Workload,
    batch: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw query, key and value uniformly from [-4, 4), as the paper's operator experiments do.

    The numbers are drawn on the CPU in float32, so that every device sees the same ones. Rounding to a
    narrower ``dtype`` may reach 4 itself.

    Args:
        workload: the shape.
        batch: images.
        seed: seed of a generator of this call's own; the global one is not touched.
        dtype: float16, bfloat16 or float32.
        device: where the tensors go.

    Returns:
        query, key and value, each ``workload.shape(batch)``.

    Raises:
        ValueError: ``batch`` is not positive.
    """
    shape = workload.shape(batch)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        (torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * 8.0 - 4.0).to(device=device, dtype=dtype)
        for _ in range(3)
    )
    return query, key, value
