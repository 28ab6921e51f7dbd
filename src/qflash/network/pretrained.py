"""Integer networks as models of transformers, which this module imports.

See :func:`.hugging_face.transformers_model` and :func:`.zero_shot.zero_shot_model`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .graph import IntegerNetwork
from .inputs import takes_ids
from .outputs import FEATURES, HIDDEN_STATES, LOGITS, TOKENS
from .towers import embeddings

_FIELDS = {
    LOGITS: "logits", "output": "logits", TOKENS: "last_hidden_state", "last_hidden_state": "last_hidden_state",
    FEATURES: "pooler_output", "pooler_output": "pooler_output", "image_embeds": "image_embeds", "text_embeds": "text_embeds",
}  # fmt: skip
"""By the name of a network's output the field of :class:`IntegerOutput`."""


@dataclasses.dataclass
class IntegerOutput(ModelOutput):
    """What a network gives, float32; None for what it does not.

    Attributes:
        last_hidden_state: (batch, tokens, channels).
        pooler_output, image_embeds, text_embeds: (batch, channels).
        logits: (batch, classes).
        hidden_states: (batch, tokens, channels) of each block that is an output of the network.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


def _asked(options: dict[str, Any]) -> list[str]:
    """Return the names of options that ask for something: of tensors, and of what is neither None nor False."""
    return [name for name, value in options.items() if isinstance(value, torch.Tensor) or value]


class _Integer(PreTrainedModel):
    """Has what transformers asks of a model whose numbers are in integer networks."""

    config_class = PretrainedConfig
    main_input_name = "pixel_values"
    # whatever attention the float model's config names
    _supports_sdpa = _supports_flash_attn = _supports_flash_attn_2 = _supports_flex_attn = _supports_attention_backend = True

    @property
    def dtype(self) -> torch.dtype:
        """Of outputs."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Of the networks."""
        return next(self.buffers()).device


class IntegerModel(_Integer):
    """Runs an integer network where transformers runs a model.

    Attributes:
        network: integer.
    """

    def __init__(self, network: IntegerNetwork, config: PretrainedConfig) -> None:
        super().__init__(config)
        unknown = [name for name in network.outputs if name not in _FIELDS and not name.startswith(HIDDEN_STATES)]
        fields = [_FIELDS[name] for name in network.outputs if name in _FIELDS]
        if unknown or len(set(fields)) < len(fields):
            raise ValueError(
                f"outputs of the network must be of {', '.join(_FIELDS)} or {HIDDEN_STATES}3, each field once, are "
                f"{', '.join(network.outputs)}"
            )
        self.network = network
        if takes_ids(network.image):
            self.main_input_name = "input_ids"
        self.eval()

    def forward(
        self, pixel_values: torch.Tensor | None = None, return_dict: bool | None = None, *,
        input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return the outputs of the network, dequantised.

        Args:
            pixel_values: uint8 (batch, channels, height, width).
            return_dict: False for a tuple.
            input_ids, attention_mask, token_type_ids: of texts, see :meth:`.graph.IntegerNetwork.forward`.
            options: of other models of transformers, which must not ask for anything that the network does not give.

        Raises:
            TypeError, ValueError: images or texts are of another type or size, or an option asks for something else.
        """
        if "spatial_shapes" in options:
            raise ValueError(
                "the integer network takes images, not patches with spatial_shapes: prepare them with "
                "qflash.image_transform(processor, size)"
            )
        hidden = any(name.startswith(HIDDEN_STATES) for name in self.network.outputs)
        asked = [name for name in _asked(options) if not (name == "output_hidden_states" and hidden)]
        if asked:
            raise ValueError(
                f"the integer network does not know {', '.join(asked)}; quantize_model(outputs=) says what it gives"
            )
        if isinstance(pixel_values, torch.Tensor) and pixel_values.is_floating_point():
            raise TypeError(
                f"pixel_values must be uint8, got {str(pixel_values.dtype).removeprefix('torch.')}: load the image processor "
                "with do_rescale=False, do_normalize=False, since the network normalises"
            )
        taken = self.network.prepared(pixel_values, input_ids, attention_mask, token_type_ids)
        found, fields = self.network.run(taken), {}
        states = []
        for name, out in found.items():
            value = out.to(torch.float32) * self.network.scales[name]
            if name in _FIELDS:
                fields[_FIELDS[name]] = value
            else:
                states.append(value)
        made = IntegerOutput(**fields, hidden_states=tuple(states) or None)
        return made.to_tuple() if return_dict is False else made

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Raise: a network has a file of its own.

        Raises:
            TypeError: always.
        """
        raise TypeError("an integer network is saved with model.network.save(path), and loaded with qflash.load_model")


@dataclasses.dataclass
class IntegerSimilarity(ModelOutput):
    """How alike images and texts are, float32.

    Attributes:
        logits_per_image: (images, texts).
        logits_per_text: (texts, images).
        text_embeds, image_embeds: (batch, channels), of length 1.
    """

    logits_per_image: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None


class IntegerTowers(_Integer):
    """Runs two integer networks where transformers runs a CLIP or a SigLIP.

    Attributes:
        images, texts: the networks.
        logit_scale: of the float model.
        logit_bias: the same, 0 where it has none.
    """

    logit_scale: torch.Tensor
    logit_bias: torch.Tensor

    def __init__(self, images: IntegerNetwork, texts: IntegerNetwork, like: Any) -> None:
        super().__init__(like.config)
        self.images, self.texts = images, texts
        device, bias = next(images.buffers()).device, getattr(like, "logit_bias", None)
        self.register_buffer("logit_scale", like.logit_scale.detach().float().to(device, copy=True))
        bias = torch.zeros(1, dtype=torch.float32, device=device) if bias is None else bias.detach().float()
        self.register_buffer("logit_bias", bias.to(device, copy=True))
        self.eval()

    def forward(
        self, input_ids: torch.Tensor | None = None, pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, *, token_type_ids: torch.Tensor | None = None,
        return_dict: bool | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return similarities of all images and texts.

        Args:
            input_ids, attention_mask, token_type_ids: of texts, see :meth:`.graph.IntegerNetwork.forward`.
            pixel_values: uint8 (batch, channels, height, width).
            return_dict: False for a tuple.
            options: of other models of transformers, which must not ask for anything.

        Raises:
            TypeError, ValueError: images or texts are of another type or size, or an option asks for something else.
        """
        if asked := _asked(options):
            raise ValueError(f"the integer networks do not know {', '.join(asked)}")
        if pixel_values is None:
            raise TypeError("pixel_values must be given, uint8 (batch, channels, height, width)")
        ids = self.texts.prepared(None, input_ids, attention_mask, token_type_ids)
        images, texts = embeddings(self.images, pixel_values), embeddings(self.texts, ids)
        logits = texts @ images.T * self.logit_scale.exp() + self.logit_bias
        made = IntegerSimilarity(logits.T, logits, texts, images)
        return made.to_tuple() if return_dict is False else made

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Raise: networks have files of their own.

        Raises:
            TypeError: always.
        """
        raise TypeError("integer networks are saved with model.images.save(path) and model.texts.save(path)")
