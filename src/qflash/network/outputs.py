"""Which tensors of a float model an integer network gives: :func:`select_outputs`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..specification.texts import is_token

OutputsOf = Callable[..., Any]
"""Takes the model and normalised images, or ids and perhaps a mask; returns a tensor, a tuple, or a dictionary of tensors."""
TOKENS, FEATURES, LOGITS = "tokens", "features", "logits"
"""Names that mean the same in every model of timm and transformers."""
_FIELDS = {TOKENS: "last_hidden_state", FEATURES: "pooler_output"}
"""What transformers calls them."""
HIDDEN_STATES = "hidden_states."
WRAPPED = "model"
"""The name of a model in its :class:`Selected`."""


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model's modules that has the same tensors, or the model itself where its modules cannot be copied.

    ``torch.export`` puts other tensors into modules for as long as it traces, and hooks may be set, which threads that use
    the model would meet. Tensors made in inference mode are copied, since they cannot be traced.
    """
    tensors = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]
    same = {id(x): x for x in (*model.parameters(), *model.buffers(), *tensors) if not x.is_inference()}
    try:
        made = copy.deepcopy(model, same)
    except Exception:  # whatever an attribute of a foreign module says to being copied
        return model
    # a copy of what torchvision's create_feature_extractor makes is in training mode
    for one, other in zip(made.modules(), model.modules(), strict=False):
        one.training = other.training
    return made


def _is_timm(model: nn.Module) -> bool:
    return all(callable(getattr(model, name, None)) for name in ("forward_features", "forward_head", "get_classifier"))


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Return names of outputs that a model has whatever it returns."""
    return (LOGITS, TOKENS, FEATURES) if _is_timm(model) else ()


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; none of what is not written in Python."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def bare(model: Any) -> Any:
    """Return a model without what ``torch.compile`` and data parallelism put around it."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while (inner := model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model


def _takes_any_number(model: nn.Module) -> bool:
    """Tell whether a model's first argument is one of any number, which ``torch.export`` has as a tuple."""
    first = next(iter(parameters_of(model.forward).values()), None)
    return first is not None and first.kind is inspect.Parameter.VAR_POSITIONAL


def takes_mask(model: nn.Module, outputs: Sequence[str] | OutputsOf | None) -> bool:
    """Tell whether an attention mask can be given: to the model by its name, or to the function of outputs behind the ids."""
    taken = parameters_of(outputs if callable(outputs) else model.forward)
    if callable(outputs):
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return sum(each.kind in by_place and each.default is each.empty for each in taken.values()) > 2
    return "attention_mask" in taken


def takes_patches(model: nn.Module) -> bool:
    """Tell whether a model of transformers takes patches of images of any proportions (SigLIP 2 NaFlex)."""
    return {"pixel_values", "spatial_shapes"} <= parameters_of(model.forward).keys()


def _as_patches(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a model that takes patches those of images; what it is given with their places stays."""
    images = args[0] if args else options.get("pixel_values")
    if len(args) > 1 or "spatial_shapes" in options or not isinstance(images, torch.Tensor) or images.dim() != 4:
        return args, options
    config = getattr(model.config, "vision_config", model.config)
    patch = config.patch_size
    batch, channels, height, width = images.shape
    if channels != config.num_channels:
        raise ValueError(f"images must have {config.num_channels} channels, got {channels}")
    if height % patch or width % patch:
        raise ValueError(f"images must have sides that are multiples of {patch}, got {height} x {width}")
    shape = height // patch, width // patch
    patches = images.reshape(batch, channels, shape[0], patch, shape[1], patch).permute(0, 2, 4, 3, 5, 1)
    # one size for all images, none of which is padded
    places = torch.tensor([shape], dtype=torch.int64, device=images.device)
    given = {"pixel_values": patches.flatten(3).flatten(1, 2), "pixel_attention_mask": None, "spatial_shapes": places}
    return (), {**options, **given}


def select_outputs(
    model: nn.Module, outputs: Sequence[str] | OutputsOf | None, padded: bool = False, alone: bool = False
) -> nn.Module:
    """Return a module that takes the model's images and returns the outputs that are wanted, perhaps among others.

    Args:
        model: the float one; it is not changed.
        outputs: see :func:`qflash.quantize_model`.
        padded: whether the module takes ids that are negative where there is no token, and the model a mask.
        alone: whether the module returns no other output than those that are named.

    Raises:
        TypeError: ``outputs`` is neither None, a function nor a list of names.
        ValueError: there are no names, or one is named twice; or a model that takes patches cannot be copied.
    """
    model = bare(model)
    changed = padded or _takes_any_number(model) or any(map(takes_patches, model.modules()))
    if outputs is None:
        return Selected(model, None, padded) if changed else model
    if callable(outputs):
        return Selected(model, outputs, padded)
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise TypeError(f"outputs must be None, a list of names, or a function of model and images, got {outputs!r}")
    names = tuple(outputs)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"outputs must be names, each of them once, got {list(names)}")
    modules = dict(model.named_modules())
    known = {*modules, TOKENS, FEATURES, *_FIELDS.values(), *([LOGITS] if _is_timm(model) else [])}
    inside = any(name in known or name.startswith(HIDDEN_STATES) for name in names)
    return Selected(model, names, padded) if inside or changed or alone else model


class Selected(nn.Module):
    """Runs a model and returns a dictionary with what it returns, and with what its submodules compute.

    Attributes:
        outputs: names, or a function of model and images; None for all that the model returns.
        padded: see :func:`select_outputs`.
        filler: id that the model sees where ids are negative.
    """

    def __init__(self, model: nn.Module, outputs: Sequence[str] | OutputsOf | None, padded: bool = False) -> None:
        super().__init__()
        self.padded, self.filler = padded, 0
        self.model, self.outputs = copy_of(model), outputs
        self.training = model.training
        parts = [part for part in self.model.modules() if takes_patches(part)]
        if parts and self.model is model:
            raise ValueError(f"{type(model).__name__} takes patches, and its modules cannot be copied to give them images")
        for part in parts:
            part.register_forward_pre_hook(_as_patches, with_kwargs=True)

    def forward(self, images: torch.Tensor) -> Any:
        """Return what the function does, or outputs by name.

        Raises:
            ValueError: a submodule is not called, or more than once, or computes no tensor.
        """
        mask: dict[str, torch.Tensor] = {}
        if self.padded:
            mask = {"attention_mask": is_token(images).to(torch.int64)}
            images = torch.where(is_token(images), images, self.filler) if self.filler else images.clamp(min=0)
        if callable(self.outputs):
            return self.outputs(self.model, images, *mask.values())
        model: Any = self.model
        if self.outputs is None:
            return _fields(model(images, **mask))
        modules = dict(model.named_modules())
        seen: dict[str, list[Any]] = {name: [] for name in self.outputs if name in modules and name}
        base = getattr(model, "base_model", None)
        hidden = any(name.startswith(HIDDEN_STATES) for name in self.outputs)
        inner: list[Any] = []
        before: list[Any] = []
        handles = [modules[name].register_forward_hook(_keeper(seen[name])) for name in seen]
        if _is_timm(model):
            classifier = model.get_classifier()
            if isinstance(classifier, nn.Module):
                handles.append(classifier.register_forward_pre_hook(lambda _, args: before.append(args[0])))
        elif isinstance(base, nn.Module) and base is not model:
            handles.append(base.register_forward_hook(_keeper(inner)))
        try:
            if _is_timm(model):
                tokens = model.forward_features(images)
                made = model.forward_head(tokens)
                found = {"output": made, LOGITS: made, TOKENS: tokens, **({FEATURES: before[-1]} if before else {})}
            else:
                more = {"output_hidden_states": True} if hidden else {}
                found = _fields(model(images, **mask, **more))
                found = {**_fields(inner[-1] if inner else None), **found}
                found |= {name: found[field] for name, field in _FIELDS.items() if field in found and name not in found}
        finally:
            for handle in handles:
                handle.remove()
        for name, outs in seen.items():
            if name in found:
                continue
            if len(outs) != 1:
                raise ValueError(f"outputs: submodule {name!r} must be called once, is called {len(outs)} times")
            out = outs[0]
            found[name] = next((x for x in out if isinstance(x, torch.Tensor)), None) if isinstance(out, (tuple, list)) else out
            if not isinstance(found[name], torch.Tensor):
                raise ValueError(f"outputs: submodule {name!r} must compute a tensor, gives {type(out).__name__}")
        # with a name that is unknown all, for the error that lists them
        return {name: found[name] for name in self.outputs} if found.keys() >= {*self.outputs} else found


def _keeper(outs: list[Any]) -> Callable[..., None]:
    return lambda _, __, out: outs.append(out)


def _fields(returned: Any) -> dict[str, Any]:
    """Return what a model returned by name: fields, ``"hidden_states.3"``, ``"output"``, ``"output0"``."""
    if isinstance(returned, torch.Tensor):
        return {"output": returned}
    if isinstance(returned, Mapping):
        found: dict[str, Any] = {}
        for name, x in returned.items():
            several = isinstance(x, (tuple, list))
            found |= {f"{name}.{number}": each for number, each in enumerate(x)} if several else {name: x}
        return found
    return {f"output{number}": x for number, x in enumerate(returned or ())}
