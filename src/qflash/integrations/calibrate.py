"""Find static scales for the attention of a patched float network: :func:`calibrate`."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..execution import quantize_bias
from ..network.calibration import Observer, check_method, lock_of, progress_bar
from ..network.conversion import Range
from ..specification import quantization
from ..specification.attention_call import AttentionCall, float_call
from ..specification.memory_format import as_four, as_four_mask, broadcast_heads
from ..specification.recipe import Recipe
from ..unseen_tokens import without_unseen
from ..validation import autocast, reason_for_float
from .inspection import coverage, listed
from .static_scales import NAME, LayerScales, StaticScales

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Watch:
    """What the attention of one layer is given, batch after batch.

    Attributes:
        recipe: of the layer.
        observers: of query, key and value, channel by channel of each head.
        shapes: heads and channels of each; None before the first call.
        calls: in the forward that runs.
        thread: that calibrates; calls of others are not looked at.
        reason: why the layer cannot have static scales; None if it can.
        error: of the data, the first.
    """

    def __init__(self, recipe: Recipe, keep: bool) -> None:
        self.recipe, self.calls, self.thread = recipe, 0, threading.get_ident()
        self.observers = [Observer(keep) for _ in range(3)]
        self.shapes: list[tuple[int, int]] | None = None
        self.reason: str | None = None
        self.error: ValueError | None = None

    def begin(self, *_: Any) -> None:
        """Hear that the module's forward begins."""
        if threading.get_ident() == self.thread:
            self.calls = 0

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> bool:
        """Look at the arguments of a call; shapes as :func:`qflash.attention` takes them.

        Returns:
            whether the call is one of the thread that calibrates, and to run with dynamic scales.
        """
        if threading.get_ident() != self.thread:
            return False
        self._look(query, key, value, mask, is_causal)
        return True

    def _look(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> None:
        self.calls += 1
        if self.calls > 1:
            self.reason = "it attends more than once in a forward"
        elif query.dim() < 4:
            self.reason = "its query has no dimension for heads beside the batch"
        unfit = reason_for_float(query, key, value, mask, 0.0, is_causal, None, True)
        if self.reason is not None or unfit is not None or 0 in (*query.shape, *key.shape, *value.shape):
            return
        query, key, value = autocast(query, key, value)
        heads = [x.shape[-3] for x in (query, key, value)]
        expanded = broadcast_heads(query, key, value)
        q, k, v = map(as_four, expanded)
        call = float_call(q, k, v, as_four_mask(mask, expanded[0]), is_causal, 1.0, self.recipe)
        tensors = self._prepared(without_unseen(call, quantize_bias))
        shapes = [(count, x.shape[-1]) for count, x in zip(heads, tensors, strict=True)]
        if self.shapes not in (None, shapes):
            self.reason = "its heads or channels differ from call to call"
            return
        self.shapes = shapes
        for x, count, observer in zip(tensors, heads, self.observers, strict=True):
            # of one head that serves all, whatever it was expanded to
            x = x[:, :count] if count == 1 else x
            try:
                observer.add(x.transpose(1, 2).flatten(2))
            except ValueError as error:
                # not raised here, where it would mean that the call does not qualify
                self.error = self.error or error

    def _prepared(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self.recipe.rotate:
            return call.query, call.key, call.value
        return quantization.hadamard_transform(call.query), quantization.hadamard_transform(call.key), call.value

    def scales(self, method: str, percentile: float) -> StaticScales:
        """Return what was found."""
        assert self.shapes is not None
        ranges = []
        for observer, shape in zip(self.observers, self.shapes, strict=True):
            found = observer.range(method, percentile)
            ranges.append(Range(found.low.view(shape), found.high.view(shape), found.mean.view(shape)))
        query, key, value = ranges
        return StaticScales(layer_scales(query, key, value, self.recipe), self.recipe)


def layer_scales(query: Range, key: Range, value: Range, recipe: Recipe) -> LayerScales:
    """Turn ranges of a layer's query, key and value into its scales.

    The recipe's granularities hold but for ``"token"``, which is ``"head"`` here: a scale for each token is one of the data.
    With ``rotate`` the ranges are those behind the rotation, where centring and balance leave the scores alone as well.

    Args:
        query, key, value: float64 (heads, channels).
        recipe: of the layer.
    """

    def centred(x: Range, wanted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the amplitudes of the channels, and what is subtracted before."""
        if wanted:
            return (x.high - x.low) / 2, x.middle
        return torch.maximum(x.low.abs(), x.high.abs()), None

    def shared(amplitude: torch.Tensor, granularity: str) -> torch.Tensor:
        """Return the scale of channels, of which some share one."""
        if granularity == "tensor":
            amplitude = amplitude.amax().view(1, 1)
        elif granularity != "channel":
            amplitude = amplitude.amax(dim=1, keepdim=True)
        return quantization.scale_from_amplitude(amplitude.float())[:, None]

    of_query, _ = centred(query, False)
    of_key, key_middle = centred(key, recipe.smooth_key)
    of_value, value_middle = centred(value, recipe.smooth_value)
    factor: torch.Tensor | None = None
    if recipe.balance:
        # all queries of a group have the exponents of its key
        group = of_query.shape[0] // of_key.shape[0]
        exponents = quantization.balance_exponents(of_query.unflatten(0, (-1, group)).amax(dim=1), of_key)
        factor = torch.ldexp(torch.ones_like(of_key), exponents)
        of_query, of_key = of_query / factor.repeat_interleave(group, dim=0), of_key * factor
    query_scale, key_scale = shared(of_query, recipe.query_granularity), shared(of_key, recipe.key_granularity)
    query_step, key_step = query_scale, key_scale
    if factor is not None:
        query_step = query_scale * factor.float().repeat_interleave(group, dim=0)[:, None]
        key_step = key_scale / factor.float()[:, None]
    middles = (None if x is None else x.float()[:, None] for x in (key_middle, value_middle))
    return LayerScales(query_step, query_scale, key_step, key_scale, shared(of_value, recipe.value_granularity), *middles)


def _run(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: names by keyword, of a list or tuple the first, anything else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


class _Eager:
    """Keeps compiled models from being compiled anew: one choice for all threads, undone when the last user is gone."""

    def __init__(self) -> None:
        self.users = 0
        self.choice = contextlib.ExitStack()
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Choose it for as long as the context lasts."""
        with self.lock:
            if self.users == 0:
                self.choice.enter_context(torch.compiler.set_stance("force_eager"))
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    self.choice.close()


_eager = _Eager()


@contextlib.contextmanager
def _watching(model: nn.Module, modules: Mapping[str, Any], watches: Mapping[str, _Watch]) -> Iterator[None]:
    """Watch the attention of a model's modules, which has dynamic scales meanwhile in the thread that calibrates."""
    with contextlib.ExitStack() as stack:
        # one thread at a time
        stack.enter_context(lock_of(model))
        if "torch._dynamo" in sys.modules:
            # a compiled model would be compiled with what watches it
            stack.enter_context(_eager.on())
        for name, watch in watches.items():
            module = modules[name]
            stack.callback(module.register_forward_pre_hook(watch.begin).remove)
            stack.callback(module.__dict__.update, _qflash_watch=None)
            module.__dict__["_qflash_watch"] = watch
        yield


@torch.inference_mode(False)  # what is made is to be written to, in any mode
def calibrate(
    model: ModelT,
    batches: Iterable[Any],
    *,
    method: str = "minmax",
    percentile: float = 99.99,
    forward: Callable[[ModelT, Any], object] | None = None,
    progress: bool = True,
) -> ModelT:
    """Give the attention of a patched model static scales, in place, so that it computes no scale when it runs.

    The patched model is run on the batches, and the ranges of the channels of each layer's query, key and value are recorded.
    They give the scales and what else the recipe takes from the data: midranges of key and value, the balance between the
    channels of query and key. A scale for each token cannot be static: such a recipe gets one for each head. docs/models.md
    says what static scales cost and gain.

    Scales are buffers of the patched modules, so that ``state_dict``, ``torch.save`` and safetensors hold them. Another model,
    patched with the same recipe, takes them by ``load_state_dict``; weights without scales are refused by a model that has
    them, and scales of another recipe by any. Calibrating again replaces them, :func:`qflash.patch` and
    :func:`qflash.unpatch` remove them. What lies beyond the calibrated ranges saturates, and NaN and infinity in the data do
    not show in the output.

    One warning, and :func:`qflash.coverage`, name the layers that keep dynamic scales, with the reason: attention by
    :func:`qflash.register_attention`, several calls of attention in one forward, tensors without a dimension for heads, or no
    batch that reached the layer. Calls inside :class:`qflash.sdpa` belong to no layer and stay dynamic as well.

    Only what the calling thread runs is observed. Other threads may use the model at the same time; if they calibrate it as
    well, batches run one after the other. The division of the data into batches changes scales only as far as it changes the
    model's activations.

    Args:
        model: patched with :func:`qflash.patch`, in eval mode. Calibrate before a CUDA graph is captured.
        batches: what the model is to be run on, on its device; 32 to 64 images are enough. A dictionary is passed by keyword,
            of a tuple or list, as data loaders give, the first element, anything else as the only argument.
        method: how a channel's range is found: ``"minmax"``, ``"percentile"`` or ``"mse"``.
        percentile: for that method, above 50 and at most 100.
        forward: called as ``forward(model, batch)`` instead, where a batch is to be passed in another way.
        progress: show a bar.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module, or ``forward`` cannot be called.
        ValueError: the model is not patched, patched with ``attention=``, or in training mode; there is no batch, none reached
            a layer that can have static scales, NaN or infinity turns up, or an argument is not one of its choices. The model
            then is as it was.

    Example::

        qflash.patch(model)
        qflash.calibrate(model, loader)
        torch.save(model.state_dict(), "calibrated.pt")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if forward is not None and not callable(forward):
        raise TypeError(f"forward must be a function of (model, batch) or None, got {type(forward).__name__}")
    percentile = check_method(method, percentile)
    if model.training:
        raise ValueError("model must be in eval mode, call model.eval()")
    # another thread may be about to give it scales
    with lock_of(model):
        modules: dict[str, Any] = dict(model.named_modules())
        layers = [layer for layer in coverage(model) if layer.route not in (None, "network")]
    reasons = {layer.name: "it attends by qflash.register_attention; qflash.patch takes it with attn_implementation='sdpa'"
               for layer in layers if layer.route == "transformers"}  # fmt: skip
    patched = [layer.name for layer in layers if layer.route != "transformers"]
    if not patched:
        raise ValueError(f"model must be patched first: qflash.patch has changed no attention of this {type(model).__name__}")
    if foreign := [name for name in patched if modules[name]._qflash_attention is not None]:
        raise ValueError(f"model must be patched without attention=, which finds no scales: {listed(foreign)}")
    watches = {name: _Watch(modules[name]._qflash_recipe, method != "minmax") for name in patched}
    count = 0
    with torch.inference_mode(), progress_bar(progress, "batches") as tick:
        for batch in batches:
            with _watching(model, modules, watches):
                _run(model, batch) if forward is None else forward(model, batch)
            if bad := next((name for name, watch in watches.items() if watch.error is not None), None):
                raise ValueError(f"batches must lead to finite numbers, {bad} was given others: {watches[bad].error}")
            count += 1
            tick(1)
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    found: dict[str, StaticScales] = {}
    for name, watch in watches.items():
        if watch.reason is None and watch.shapes is None:
            watch.reason = "no batch reached its attention in integers"
        if watch.reason is None:
            with lock_of(model):
                like = next((x for x in (*modules[name].parameters(), *modules[name].buffers())), None)
            found[name] = watch.scales(method, percentile).to(None if like is None else like.device)
        else:
            reasons[name] = watch.reason
    if not found:
        raise ValueError(f"model has no attention that can have static scales: {_described(reasons)}")
    with lock_of(model):
        for name in patched:
            module = modules[name]
            module.__dict__["_qflash_dynamic"] = reasons.get(name)
            if name in found:
                module.add_module(NAME, found[name])
            else:
                module._modules.pop(NAME, None)
    if reasons:
        warnings.warn(f"{type(model).__name__} keeps dynamic scales: {_described(reasons)}", stacklevel=2)
    return model


def _described(reasons: Mapping[str, str]) -> str:
    """Name layers by the reason that they share."""
    kinds: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        kinds.setdefault(reason, []).append(name)
    return "; ".join(f"{listed(names)} ({reason})" for reason, names in kinds.items())
