"""An integer network where libraries run a model of transformers.

:func:`transformers_model`, and :func:`sentence_transformer` for sentence-transformers.
"""

from __future__ import annotations

from typing import Any

from ..optional_packages import require_packages
from .graph import IntegerNetwork, check_network
from .inputs import takes_ids
from .outputs import TOKENS


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


def sentence_transformer(model: Any, network: IntegerNetwork) -> Any:
    """Have a SentenceTransformer run an integer network in the place of its encoder, and return it.

    The float encoder is dropped. ``encode`` tokenises, runs the network, dequantises its tokens, and pools and normalises them
    in floating point.

    Args:
        model: a SentenceTransformer whose first module holds an encoder of transformers. It is changed.
        network: of that encoder, calibrated with masks: ``quantize_model(model[0].auto_model, [tokens], outputs=[
            "last_hidden_state"])``.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument is something else.
        ValueError: the model has another first module, or the network does not go with it.
        ImportError: sentence-transformers or transformers is not installed.

    Example::

        model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2").eval()
        model.max_seq_length = 128
        tokens = model.tokenizer(texts, padding="max_length", max_length=128, truncation=True, return_tensors="pt")
        network = qflash.quantize_model(model[0].auto_model, [tokens], outputs=["last_hidden_state"])
        embeddings = qflash.sentence_transformer(model, network).encode(["A sentence."])
    """
    check_network(network)
    require_packages("sentence_transformer", "sentence_transformers", "transformers")
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel

    if not isinstance(model, SentenceTransformer):
        raise TypeError(f"model must be a SentenceTransformer, got {type(model).__name__}")
    first = model[0]
    encoder = getattr(first, "auto_model", None)
    # the attribute has another name in newer versions, where auto_model is a property
    name = next((own for own, x in first.named_children() if x is encoder), None)
    if name is None or not isinstance(encoder, PreTrainedModel):
        raise ValueError(
            "model must have an encoder of transformers in its first module, model[0].auto_model, has "
            f"{type(first).__name__} with {type(encoder).__name__}"
        )
    given = [output for output in network.outputs if output in (TOKENS, "last_hidden_state")]
    if not takes_ids(network.image) or len(given) != 1:
        raise ValueError(
            "network must take ids of tokens and give last_hidden_state, one of images or of other outputs was given: "
            f"{', '.join(network.outputs)}"
        )
    if not network.is_padded or not network.takes_shorter:
        raise ValueError(
            "network must take texts of different lengths: calibrate it with an attention_mask, and without relative positions"
        )
    tokens, vocabulary = network.image
    rows, channels = encoder.config.vocab_size, network.shapes()[network.outputs[given[0]]][-1]
    if (vocabulary, channels) != (rows, encoder.config.hidden_size):
        raise ValueError(
            f"network must be of the model's encoder, which has {rows} tokens and {encoder.config.hidden_size} channels, has "
            f"{vocabulary} and {channels}"
        )
    if model.max_seq_length is None or model.max_seq_length > tokens:
        raise ValueError(
            f"model.max_seq_length must be at most {tokens}, the tokens of the network's calibration texts, is "
            f"{model.max_seq_length}: set it, or calibrate with longer texts"
        )
    setattr(first, name, transformers_model(network, encoder.config))
    return model
