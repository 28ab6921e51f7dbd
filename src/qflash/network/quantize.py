"""Quantise a whole network: :func:`quantize_model`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..integrations.images import ImageTransform, image_transform, is_image, pixels_of
from ..integrations.inspection import listed
from ..specification.recipe import Recipe, resolve_recipe
from ..specification.texts import PADDING, is_token
from .calibration import EXPECTED, METHODS, Calibration, check_method, progress_bar
from .capture import capture
from .capture.operations import BATCH, UnsupportedError
from .capture.unread import drop_unread_rows, split_layers
from .checks import check_captured, check_rotated, is_constant, judge
from .conversion import rounded_once
from .float_parts import kept_nodes, with_float_parts
from .graph import IntegerNetwork
from .inputs import check_input, text_ids
from .outputs import OutputsOf, bare, takes_mask
from .patterns import Lowering
from .resampling import check_same_nodes, difference, model_at, resized
from .rotation import rotate_streams
from .sizes import Size, shown, whole_sizes

HELD_OUT = 8
"""Images that the ranges do not see where there are twice as many; the network is judged on them."""


def _check_model(model: nn.Module) -> None:
    """Require a model with weights in eval mode that is not patched."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model must be the torch.nn.Module that TorchScript was made of: torch.export takes no ScriptModule")
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise TypeError(f"model must be a torch.nn.Module with parameters, got {type(model).__name__}")
    if patched := [name for name, module in model.named_modules() if hasattr(type(module), "_qflash_base")]:
        raise ValueError(f"model must not be patched, call qflash.unpatch(model); patched are {listed(patched)}")
    if model.training:
        raise ValueError("model must be in eval mode, call model.eval()")
    for name, module in model.named_modules():
        rate = getattr(module, "p", 0) if isinstance(module, nn.modules.dropout._DropoutNd) else vars(module).get("drop_prob")
        if module.training and (rate or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            raise ValueError(f"model must be in eval mode as a whole, call model.eval(); {name} is in training mode")


def _check_weights(model: nn.Module) -> None:
    """Require weights that are there and finite."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ValueError(f"model must have weights, {name} is on the meta device, without values")
        if not x.is_floating_point():
            continue
        # detached, since a model that is made in inference mode may not be asked for gradients
        values = x.detach()
        usable = values.isfinite()
        if not isinstance(x, nn.Parameter):
            # a mask of attention hides keys by -inf, the upper bound of a clamp may be infinity
            usable = usable | values.isneginf() | values.isposinf().all()
        if not bool(usable.all()):
            raise ValueError(f"model must have finite weights, NaN or infinity is in {name}")


def find_statistics(
    model: nn.Module, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation of each channel: those given, or the model's.

    Raises:
        ValueError: neither has them, or they are not of pixels from 0 to 1.
    """
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    found = []
    for name, given in (("mean", mean), ("std", std)):
        values = config.get(name) if given is None else given
        if values is None:
            raise ValueError(f"{name} must be given: the model's pretrained_cfg has none")
        try:
            numbers = [float(x) for x in values]
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a list of a number for each of the images' channels, got {values!r}") from error
        if len(numbers) != channels or not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers) <= 0):
            of = "channel" if channels == 1 else f"{channels} channels"
            positive = " above 0" * (name == "std")
            raise ValueError(f"{name} must be {channels} numbers{positive}, one for each of the images' {of}, got {numbers}")
        if max(map(abs, numbers)) > 1:
            raise ValueError(f"{name} must be of pixels from 0 to 1, got {numbers}; of pixels from 0 to 255 divide it by 255")
        found.append(numbers)
    return found[0], found[1]


def _images_of(batch: Any, of_images: Callable[[Sequence[Any]], torch.Tensor]) -> Any:
    """Return the images, or the ids of tokens, of a batch as data loaders give it.

    ``of_images`` turns images of PIL into a tensor.
    """
    if isinstance(batch, Mapping):
        found = [x for x in batch.values() if isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and x.dim() == 4]
        if len(found) != 1:
            pixels = batch.get("pixel_values")
            advice = ""
            if isinstance(pixels, torch.Tensor) and pixels.is_floating_point():
                advice = "; qflash.image_transform(processor) makes uint8 images, or do_rescale=False, do_normalize=False"
            raise TypeError(
                "a batch that is a dictionary must hold one uint8 tensor (batch, channels, height, width), got entries "
                f"{', '.join(f'{key!r} of {_described(x)}' for key, x in batch.items()) or 'none'}{advice}"
            )
        return found[0]
    if is_image(batch):
        return of_images([batch])
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise TypeError("a batch must be uint8 images or begin with them, got an empty one")
        if all(map(is_image, batch)):
            return of_images(batch)
        # a list of PIL images and their labels
        return _images_of(batch[0], of_images) if isinstance(batch[0], (list, tuple)) or is_image(batch[0]) else batch[0]
    return batch


def _described(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _check_dimensions(images: Any) -> None:
    """Require uint8 images to be a batch with channels first.

    Raises:
        ValueError: they are single ones, or have channels last.
    """
    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
        return  # somebody else says what is wrong
    shape, advice = tuple(images.shape), ""
    if len(shape) == 3:
        advice = "; of single images torch.utils.data.DataLoader(images, 32) makes batches"
    elif len(shape) == 4 and shape[3] in (1, 3) and shape[1] > 4:
        advice = ", whose channels come last: images.permute(0, 3, 1, 2)"
    if advice or len(shape) != 4:
        raise ValueError(f"images must have shape (batch, channels, height, width), got {shape}{advice}")


class _Texts:
    """Ids of the batches that tokenisers return.

    Attributes:
        has_mask: whether the first has an attention mask that the model takes.
    """

    def __init__(self, can_mask: bool) -> None:
        self.can_mask, self.has_mask = can_mask, False

    def ids_of(self, batch: Mapping[str, Any], size: tuple[int, ...] | None) -> torch.Tensor:
        """Return ids, negative where there is no token, of the size of the first batch, (tokens, ...).

        Raises:
            TypeError, ValueError: the batch is something else.
        """
        if size is None:
            self.has_mask = self.can_mask and batch.get("attention_mask") is not None
        ids = text_ids(batch, self.has_mask)
        if self.has_mask:
            if bool((~is_token(ids)).all(dim=1).any()):
                raise ValueError("attention_mask must have a token in every text of calibration, one has none")
            if size is not None and ids.shape[1] < size[0]:
                ids = nn.functional.pad(ids, (0, size[0] - ids.shape[1]), value=PADDING)
        return ids


def _stream(
    batches: Iterable[Any], device: torch.device, model: nn.Module, texts: _Texts, wanted: Size | None = None
) -> Iterator[torch.Tensor]:
    """Yield the images, or ids of tokens, of batches that hold any, on a device; all have the size of the first.

    Args:
        batches: see :func:`quantize_model`.
        device: see there.
        model: whose preparation images of PIL go through.
        texts: of batches that tokenisers return.
        wanted: size of the images; None for any.

    Raises:
        TypeError, ValueError: they are something else; the message names it.
    """
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        is_dataset = isinstance(batches, torch.utils.data.Dataset)
        raise TypeError(
            f"calibration_batches must be a list or another iterable of batches, got {_described(batches)}; "
            f"{'DataLoader(dataset, 32) makes batches' if is_dataset else 'write [images] for one batch'}"
        )
    size: tuple[int, ...] | None = None

    @functools.cache
    def transform() -> ImageTransform | None:
        return image_transform(model, wanted) if "input_size" in (getattr(model, "pretrained_cfg", None) or {}) else None

    def of_images(images: Sequence[Any]) -> torch.Tensor:
        return pixels_of(images, transform())

    for batch in batches:
        is_text = isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor)
        images = texts.ids_of(batch, size) if is_text else _images_of(batch, of_images)
        if size is None:
            _check_dimensions(images)
            known = isinstance(images, torch.Tensor) and images.dim() == 4
            size = tuple(images.shape[1:]) if known else (3, 0, 0)
            if isinstance(images, torch.Tensor) and images.dim() == 2 and images.dtype in (torch.int32, torch.int64):
                size = images.shape[1], 0
            if wanted is not None and known and tuple(size[1:]) != wanted:
                raise ValueError(f"calibration images must have the first of sizes, {shown(wanted)}, are {shown(size[1:])}")
            if wanted is not None and len(size) == 2:
                raise ValueError("sizes must be None of a model that takes ids of tokens")
        check_input(images, size)
        if len(images):
            yield images.to(device)


def _begin(stream: Iterator[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
    """Take the images that a network is judged on from the stream, and no more than it takes to tell which.

    Returns:
        those images; batches that the ranges see before the rest of the stream; whether the first are kept out of the second.

    Raises:
        ValueError: there are none.
    """
    taken: list[torch.Tensor] = []
    while sum(map(len, taken)) < 2 * HELD_OUT and (images := next(stream, None)) is not None:
        # a copy, since a loader may write its next batch to the same place
        taken.append(images.clone())
    if not taken:
        raise ValueError("calibration_batches must hold at least one image, got none")
    if sum(map(len, taken)) < 2 * HELD_OUT:
        return torch.cat(taken), taken, False
    first = torch.cat([images[:HELD_OUT] for images in taken])[:HELD_OUT]
    left, rest = HELD_OUT, []
    for images in taken:
        rest.append(images[left:])
        left = max(0, left - len(images))
    return first, [images for images in rest if len(images)], True


class Normalise:
    """Turns uint8 images into what a float model takes: ``(images / 255 - mean) / std`` for each channel, float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (torch.tensor(x, dtype=torch.float32, device=device).view(1, -1, 1, 1) for x in (mean, std))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return (images.to(torch.float32) / 255 - self.mean) / self.std


class Preparation:
    """Turns what a network takes into what the float model takes: images as :class:`Normalise` does, ids as they are."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.normalise, self.device = Normalise(mean, std, device), device

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(self.device) if x.dim() == 2 else self.normalise(x.to(self.device)).to(dtype)


@dataclasses.dataclass(eq=False)
class _Lowered:
    """A model that has been read at one image size.

    Attributes:
        images: uint8, that the network is judged on.
        exact: the same as the float model takes them.
        wanted: the model's outputs for these.
        lowering, network: what came of it; the network is empty.
    """

    images: torch.Tensor
    exact: torch.Tensor
    wanted: dict[str, torch.Tensor]
    lowering: Lowering
    network: IntegerNetwork


def _lower(
    model: nn.Module, images: torch.Tensor, size: Size | None, prepare: Preparation, recipe: Recipe, outputs: Any,
    padded: bool = False,
) -> _Lowered:  # fmt: skip
    """Read a model.

    Args:
        model: the float one.
        images: uint8, or ids, that the network will be judged on.
        size: that the model is brought to; None leaves it as it is.
        prepare: for the model.
        recipe: of attention.
        outputs: see :func:`quantize_model`.
        padded: whether ids may be of places without a token.

    Raises:
        ValueError: it cannot be read; see :func:`quantize_model`.
    """
    dtype, image = next(model.parameters()).dtype, tuple(images.shape[1:])
    # made anew where it is needed, since copies of a model hold its weights
    there = (lambda each: each) if size is None else functools.partial(model_at, size=size)
    captured = capture(there(model), prepare(images[:1].repeat(BATCH, *[1] * len(image)), dtype), outputs, padded=padded)
    if size is not None:
        select = captured.select
        captured.select = lambda each: select(there(each))
    if images.dim() == 2:
        tables = [x.weight for x in captured.operations if x.kind == "embedding" and x.weight is not None]
        image = image[0], min(map(len, tables), default=1)
    # of a float64 model in its own type
    exact = prepare(images, torch.promote_types(dtype, torch.float32))
    if padded or any(each.is_causal for each in captured.operations):
        # exact sums take the mean over all keys, hidden ones too
        recipe = recipe.replace(row_sum="rounded")
    with torch.no_grad():
        wanted = check_captured(captured, model, exact)
        split_layers(captured)
        drop_unread_rows(captured)
        if rotate_streams(captured):
            check_rotated(captured, exact[:BATCH], wanted)
        lowering = Lowering(captured, recipe, image)
        return _Lowered(images, exact, wanted, lowering, lowering.lower())


def _lower_again(first: _Lowered, model: nn.Module, size: Size, prepare: Preparation, recipe: Recipe, outputs: Any) -> _Lowered:
    """Read a model at a further size, where it has to have the same operators; arguments as of :func:`_lower`.

    Raises:
        UnsupportedError: it has not, or cannot be read there.
    """
    try:
        found = _lower(model, resized(first.images, size), size, prepare, recipe, outputs)
        check_same_nodes(first.network, found.network)
    except ValueError as error:
        raise UnsupportedError(f"model {type(model).__name__} has no integer form at {shown(size)} pixels: {error}") from error
    return found


class _Variety:
    """Whether images differ, and show anything."""

    def __init__(self) -> None:
        self.count, self.first = 0, torch.empty(0, dtype=torch.uint8, device="cpu")
        self.differ = self.show = False

    def add(self, images: torch.Tensor) -> None:
        if not self.count:
            self.first = images[:1].clone()
        self.count += len(images)
        self.differ = self.differ or bool((images != self.first).any())
        self.show = self.show or images.dim() == 2 or bool((images != images[:, :, :1, :1]).any())

    def check(self) -> None:
        """Require images that differ and show something.

        Raises:
            ValueError: they do not.
        """
        advice = "ranges of activations need different images, 32 to 64 are enough"
        if not self.show:
            raise ValueError(f"calibration images must show something, got {self.count} of one colour each; {advice}")
        if not self.differ:
            found = f"{self.count} that are equal" if self.count > 1 else "one"
            raise ValueError(f"calibration images must differ, got {found}; {advice}")


@torch.inference_mode(False)  # what is made is to be written to, in any mode
def quantize_model(
    model: nn.Module,
    calibration_batches: Iterable[Any],
    recipe: Recipe | str | None = None,
    *,
    method: str = EXPECTED,
    percentile: float = 99.99,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    keep_float: Sequence[str] = (),
    outputs: Sequence[str] | OutputsOf | None = None,
    sizes: Sequence[int | Sequence[int]] | None = None,
    progress: bool = True,
    min_sqnr: float | None = 10.0,
) -> IntegerNetwork:
    """Quantise a vision transformer to integers, weights and activations of 8 bits, after training.

    The result takes uint8 images and returns int32 logits (times ``output_scale``); nothing between is a float. Static scales
    are found on the calibration images. ``docs/integer_network.md`` says what is computed and what is folded away.

    Two comparisons guard the result. What was read of the model is computed in floating point, without the model's own code,
    and has to equal the model. Then the integer network is compared with the model on calibration images: on the first 8,
    which the ranges do not see, where there are 16 or more; on all, which the ranges see, where there are fewer. The second
    result is the network's :attr:`~.graph.IntegerNetwork.quality`.

    Args:
        model: an encoder of images or texts in eval mode, float32, float16 or bfloat16, of timm, transformers, torchvision or
            your own: what counts is what it computes, which ``torch.export`` traces. It is not changed.
        calibration_batches: a list or another iterable of batches, which is gone through once. A batch is uint8 images (batch,
            channels, height, width), 0 to 255, or a tuple that begins with them, or a dictionary with them as its only such
            tensor (``pixel_values``). Images of PIL are taken, too, one or a list in the place of the tensor: a model of timm
            has them resized and cropped as its ``pretrained_cfg`` says, other models need them of one size
            (:func:`qflash.image_transform`). Of a text encoder: ids, int32 or int64 (batch, tokens), or a tokeniser's
            dictionary; with an ``attention_mask`` in the first batch the network takes masks, too (TOSA then has no form of
            it). 32 to 64 images are enough; they have to differ.
        recipe: of attention (exponential, probabilities, row sum); scales are static whatever it says of granularity, and the
            row sum is ``"rounded"`` where keys are hidden, by padding or in causal order.
        method: how a channel's range is found: ``"expected"``, from the mean of the images' minima and maxima to 2.5 of their
            deviations beyond; ``"minmax"``, ``"percentile"`` or ``"mse"``. Vision transformers have a few massive activations
            that carry the result: clipping them, as the last two do, mostly costs accuracy.
        percentile: for that method, above 50 and at most 100.
        mean, std: of the image channels, of pixels in [0, 1]; the model's ``pretrained_cfg`` if None.
        keep_float: names of submodules, or of nodes, that compute in floating point: ``"blocks.3.attn"``, ``"blocks.3"``,
            ``"head"``.
        outputs: what is wanted; a network of several returns a dictionary. None: ``"logits"`` of a model that returns them,
            otherwise all that it returns. A list of names: of what the model returns; of submodules, whose output it is
            (``"blocks.3"``); ``"tokens"``, ``"features"`` and ``"logits"`` of models of timm and transformers;
            ``"hidden_states.3"`` of transformers. Or a function of model and images that returns a tensor, a tuple or a
            dictionary: ``lambda model, x: model.forward_intermediates(x, [3, 11])``. ``docs/integer_network.md`` has the
            shapes.
        sizes: (height, width) of images that the network takes, or pixels of each side; the first is that of the calibration
            images, which are resized to the others; None for these alone. Weights and scales are the same for all sizes:
            ranges are found, and the network is judged (``network.at(size).quality``), on the images of all of them. Position
            embeddings are those that the float model has at a size: models that take any do so by themselves, others are run
            with ``interpolate_pos_encoding`` (transformers) or ``set_input_size`` (timm).
        progress: show a bar.
        min_sqnr: least signal-to-quantisation-noise ratio of the output in dB, at each size; None accepts any. Below 20 dB
            there is a UserWarning in any case, and where outputs differ from image to image by less than their error.

    Raises:
        TypeError: of the model, of ``calibration_batches`` or a batch, or of images that are not uint8.
        ValueError: the model is in training mode, patched, on the meta device, or has NaN or infinity in its weights; it has a
            part without an integer form here (all are named), cannot run at one of ``sizes``, or computes something else than
            what was read of it (the first part that differs is named). There are no images, they have the wrong size or do not
            differ. The model gives different images the same output, or the integer network has less than ``min_sqnr`` (the
            worst parts are named). An argument is not one of its choices.
    """
    model = bare(model)
    _check_model(model)
    percentile = check_method(method, percentile, (EXPECTED, *METHODS))
    choices = resolve_recipe(recipe)
    if min_sqnr is not None and (not isinstance(min_sqnr, int | float) or not math.isfinite(min_sqnr)):
        raise ValueError(f"min_sqnr must be a finite number of dB or None, got {min_sqnr!r}")
    _check_weights(model)
    parameter = next(model.parameters())
    wanted_sizes = None if sizes is None else whole_sizes(sizes)
    size, *others = wanted_sizes or (None,)
    texts = _Texts(takes_mask(model, outputs))
    stream = _stream(calibration_batches, parameter.device, model, texts, size)
    judged, begun, held_out = _begin(stream)
    means, deviations = [0.0], [1.0]
    if judged.dim() == 4:
        means, deviations = find_statistics(model, judged.shape[1], mean, std)
    prepare = Preparation(means, deviations, parameter.device)
    first = _lower(model, judged, size, prepare, choices, outputs, texts.has_mask)
    further = [_lower_again(first, model, each, prepare, choices, outputs) for each in others if each is not None]
    lowering = first.lowering
    variety = _Variety()
    with torch.no_grad():
        calibrations: list[Calibration] = []
        for each in (first, *further):
            read, like = each.lowering.captured, calibrations[0] if calibrations else None
            calibrations.append(
                Calibration(read.module, each.lowering.observed, method in ("percentile", "mse"), like, read.tokens)
            )
        with progress_bar(progress, "images") as tick:
            for images in itertools.chain(begun, stream):
                variety.add(images)
                # one at a time: a float product of another number of rows may round otherwise
                for one in images.split(1):
                    for each, calibration in zip((first, *further), calibrations, strict=True):
                        calibration.run(prepare(resized(one, each.images.shape[2:]), parameter.dtype))
                    tick(1)
    variety.check()
    for name, want in first.wanted.items():
        if is_constant(want) and not is_constant(judged):
            numbers = want[0].flatten()[:4].tolist()
            raise ValueError(f"model gives {len(judged)} different calibration images the same {name}: {numbers}, ...")
    ranges = list(calibrations[0].ranges(method, percentile).values())
    networks = []
    with rounded_once() if further else contextlib.nullcontext():
        for each in (first, *further):
            # the observed nodes of all sizes come in the same order
            each.lowering.fill(each.network, dict(zip(each.lowering.observed, ranges, strict=True)), means, deviations)
            made = each.network.to(parameter.device).eval()
            if keep_float:
                twins, grids = each.lowering.twins, each.lowering.grids
                made = with_float_parts(made, twins, grids, kept_nodes(made, twins, keep_float))
            networks.append(made)
    network = networks[0]
    for each, made in zip((first, *further), networks, strict=True):
        where = "" if each is first else f" of {shown(made.image[1:])} pixels"
        made.quality = judge(made, each.lowering, each.images, each.exact, each.wanted, held_out, min_sqnr, where)
    for made in networks[1:]:
        network.add_size(difference(network, made))
    network.lowering = lowering
    return network
