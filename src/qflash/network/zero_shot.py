"""Both towers of a CLIP or a SigLIP as integer networks, where their library runs the float model: :func:`zero_shot_model`."""

from __future__ import annotations

from typing import Any

from torch import nn

from .graph import IntegerNetwork, check_network
from .inputs import takes_ids
from .towers import OpenClipTowers


def zero_shot_model(images: IntegerNetwork, texts: IntegerNetwork, like: nn.Module) -> Any:
    """Return a model with the interface of ``like`` whose image and text encoders are integer networks.

    Embeddings are the networks' outputs, dequantised. Their length 1, similarities, scale and bias are in floating point, as
    in the float model. Images are uint8: the networks normalise them.

    Like a ``CLIPModel`` or ``SiglipModel`` of transformers it takes ``input_ids``, ``attention_mask`` and
    ``pixel_values`` of a processor with ``do_rescale=False, do_normalize=False``, and returns ``logits_per_image``,
    ``logits_per_text``, ``text_embeds`` and ``image_embeds``, also in ``pipeline("zero-shot-image-classification")``. Like a
    ``CLIP`` or ``CustomTextCLIP`` of open_clip it has ``encode_image``, ``encode_text``, ``get_logits`` and a call with both.

    Args:
        images: a network of images with one output, (batch, channels).
        texts: a network of ids of tokens with one output of as many channels.
        like: the float model, whose scale, bias and configuration are taken.

    Raises:
        TypeError: an argument is something else.
        ValueError: the networks do not go together, or not with ``like``.

    Example::

        def encode_text(model, ids, mask):
            return model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output


        def encode_image(model, pixels):
            return model.get_image_features(pixel_values=pixels).pooler_output


        tokens = tokenizer(captions, padding="max_length", return_tensors="pt")
        texts = qflash.quantize_model(clip, [tokens], outputs=encode_text)
        images = qflash.quantize_model(clip, [pixels], outputs=encode_image, mean=mean, std=std)
        model = qflash.zero_shot_model(images, texts, clip)
        classify = pipeline("zero-shot-image-classification", model=model, tokenizer=tokenizer, image_processor=processor)
    """
    library = next((name for name in map(_library, type(like).__mro__) if name), None)
    if library is None:
        raise TypeError(
            "like must be a CLIPModel or SiglipModel of transformers, or a CLIP or CustomTextCLIP of open_clip, got "
            f"{type(like).__name__}"
        )
    widths = []
    for name, network, kind in (("images", images, "images"), ("texts", texts, "ids of tokens")):
        check_network(network, name)
        if takes_ids(network.image) != (name == "texts"):
            raise ValueError(f"{name} must be a network that takes {kind}, takes {'images' if name == 'texts' else 'ids'}")
        found = [network.shapes()[node] for node in network.outputs.values()]
        if len(found) != 1 or len(found[0]) != 2:
            raise ValueError(f"{name} must have one output, (batch, channels), has {', '.join(network.outputs)}")
        widths.append(found[0][1])
    if widths[0] != widths[1]:
        raise ValueError(f"images and texts must have embeddings of as many channels, have {widths[0]} and {widths[1]}")
    if library == "transformers":
        config: Any = like.config
        known = config.text_config.vocab_size
        if texts.image[1] != known:
            raise ValueError(f"texts must take ids of like's {known} tokens, takes {texts.image[1]}")
        width = getattr(config, "projection_dim", None)
        if width not in (None, widths[0]):
            raise ValueError(f"images and texts must have like's {width} channels, have {widths[0]}")
        from transformers.models.auto.modeling_auto import MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

        from .pretrained import IntegerTowers

        # pipelines log an error for classes whose name is not there
        CLASSIFIERS.setdefault("qflash", IntegerTowers.__name__)
        return IntegerTowers(images, texts, like)
    context: Any = like.context_length
    if texts.image[0] != context:
        raise ValueError(f"texts must take the {context} tokens of a text of like, takes {texts.image[0]}")
    return OpenClipTowers(images, texts, like)


_TAKEN = {
    ("transformers", "CLIPModel"), ("transformers", "SiglipModel"), ("open_clip", "CLIP"), ("open_clip", "CustomTextCLIP"),
}  # fmt: skip


def _library(kind: type) -> str | None:
    """Return the library of a class whose interface is known here."""
    library = kind.__module__.partition(".")[0]
    return library if (library, kind.__name__) in _TAKEN else None
