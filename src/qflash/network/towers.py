"""Two integer networks where code calls a CLIP of open_clip, and their embeddings; see :func:`.zero_shot.zero_shot_model`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .graph import IntegerNetwork
from .inputs import takes_ids


def embeddings(network: IntegerNetwork, x: torch.Tensor, normalize: bool = True) -> torch.Tensor:
    """Return a network's output for images or ids, dequantised, float32 (batch, channels), of length 1 if ``normalize``.

    Raises:
        TypeError, ValueError: they are of another type or size.
    """
    if not takes_ids(network.image) and isinstance(x, torch.Tensor) and x.is_floating_point():
        raise TypeError(
            f"images must be uint8, got {str(x.dtype).removeprefix('torch.')}: leave out rescaling and normalising "
            "(do_rescale=False, do_normalize=False of processors), since the network normalises"
        )
    found: torch.Tensor = network.dequantize(network(x))
    return nn.functional.normalize(found, dim=-1) if normalize else found


class OpenClipTowers(nn.Module):
    """Runs two integer networks where code calls a CLIP of open_clip.

    Attributes:
        images, texts: the networks.
        logit_scale, logit_bias: of the float model, the second None where it has none.
        context_length: tokens of a text.
        output_dict: whether a call returns a dictionary.
    """

    logit_scale: torch.Tensor
    logit_bias: torch.Tensor | None

    def __init__(self, images: IntegerNetwork, texts: IntegerNetwork, like: Any) -> None:
        super().__init__()
        self.images, self.texts = images, texts
        self.context_length, self.output_dict = like.context_length, like.output_dict
        device = next(images.buffers()).device
        for name in ("logit_scale", "logit_bias"):
            value = getattr(like, name)
            self.register_buffer(name, None if value is None else value.detach().float().to(device, copy=True))
        self.eval()

    def encode_image(self, image: torch.Tensor, normalize: bool = False) -> torch.Tensor:
        """Return embeddings, float32 (batch, channels), of images, uint8 (batch, channels, height, width)."""
        return embeddings(self.images, image, normalize)

    def encode_text(self, text: torch.Tensor, normalize: bool = False) -> torch.Tensor:
        """Return embeddings, float32 (batch, channels), of ids, int32 or int64 (batch, tokens)."""
        return embeddings(self.texts, text, normalize)

    def get_logits(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of each image, (images, texts), and of each text, (texts, images)."""
        logits = self.logit_scale.exp() * self.encode_image(image, True) @ self.encode_text(text, True).T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        return logits, logits.T

    def forward(self, image: torch.Tensor | None = None, text: torch.Tensor | None = None) -> Any:
        """Return embeddings of length 1 of both, None for what is not given, the scale, and the bias if there is one."""
        found = {
            "image_features": None if image is None else self.encode_image(image, True),
            "text_features": None if text is None else self.encode_text(text, True),
            "logit_scale": self.logit_scale.exp(),
        }
        if self.logit_bias is not None:
            found["logit_bias"] = self.logit_bias
        return found if self.output_dict else tuple(found.values())
