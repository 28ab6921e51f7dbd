"""Random weights of models without pretrained ones, with which every layer shows in the output."""

from __future__ import annotations

import re

import torch
from torch import nn


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw all weights that an initialisation leaves constant, zero or small, always the same.

    A model as timm initialises it may have class tokens and layer scales next to zero: then its output shows little of its
    blocks, or is lost beside them in any arithmetic.
    """
    generator = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        if not x.is_floating_point() or x.numel() == 0:
            continue
        leaf = name.rsplit(".", 1)[-1]
        if x.numel() == max(x.shape, default=1):
            if re.search(r"gamma|lambda|layer_scale|ls\d", name):
                x.uniform_(0.2, 1.2, generator=generator)
            else:
                x.add_(torch.randn(x.shape, generator=generator) * 0.1)
        elif "bias_table" in name:
            x.normal_(0.0, 0.5, generator=generator)
        elif "weight" not in leaf and "proj" not in leaf:
            # class tokens, position embeddings
            x.normal_(0.0, 0.2, generator=generator)
        elif float(x.std()) < 0.01:
            x.normal_(0.0, 0.03, generator=generator)
