"""An integer network with the interface of transformers: :func:`transformers_model`."""

from __future__ import annotations

from typing import Any

from ..optional_packages import require_packages
from .graph import IntegerNetwork, check_network


def transformers_model(network: IntegerNetwork, config: Any = None) -> Any:
    """Return a model of transformers that runs an integer network: in ``pipeline`` and in code of your own.

    It takes uint8 ``pixel_values``, so the image processor is loaded with ``do_rescale=False, do_normalize=False``; of a text
    encoder what its tokeniser returns, with as many tokens as the calibration texts, or fewer where the network takes fewer. It
    returns a ``ModelOutput`` with ``logits``, ``last_hidden_state``, ``pooler_output``, ``image_embeds``, ``text_embeds`` and
    ``hidden_states``: those that the network gives (``quantize_model(outputs=["logits", "tokens", "features"])``), float32. Its
    index 0 is the first of ``last_hidden_state``, ``pooler_output``, ``image_embeds``, ``text_embeds``, ``logits`` that is
    there. It does not train, generate or save.

    Args:
        network: an integer network; ``model.network`` afterwards.
        config: ``PretrainedConfig`` of the float model, for names of classes; None takes those of the network's file.

    Raises:
        TypeError: ``network`` or ``config`` is something else.
        ValueError: an output of the network has no such field.
        ImportError: transformers is not installed.

    Example::

        processor = AutoImageProcessor.from_pretrained(name, do_rescale=False, do_normalize=False)
        model = qflash.transformers_model(qflash.load_model("vit.safetensors"))
        classify = transformers.pipeline("image-classification", model=model, image_processor=processor)
    """
    check_network(network)
    require_packages("transformers_model", "transformers")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    from .pretrained import IntegerModel

    if config is None:
        labels = network.about.get("labels", [])
        config = transformers.PretrainedConfig(id2label=dict(enumerate(labels))) if labels else transformers.PretrainedConfig()
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(f"config must be a PretrainedConfig of transformers, got {type(config).__name__}")
    # pipelines log an error for classes whose name is not there
    CLASSIFIERS.setdefault("qflash", IntegerModel.__name__)
    return IntegerModel(network, config)
