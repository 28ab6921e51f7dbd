"""Build model families of timm, torchvision and transformers with random weights, patch them and record how each attends.

``python scripts/survey_models.py [--only LIBRARY] [--fresh] [NAME ...]``; names limit the models to those that contain one of
them. Results go to ``benchmarks/results/model_survey.json`` as they come: a run that was broken off goes on where it was.
``python scripts/survey_models.py --table`` writes the tables of docs/models.md from that file.

timm: every registered architecture is built without memory for weights (PyTorch's meta device), its classes of attention are
looked up, and if it has any it is run patched, which tells shapes, types and memory layouts, no values. Of the architectures
that have the same classes the smallest is built with random weights and run. transformers: families of ``SMALL`` are run with
random weights, patched and by name; every model that takes pixels is run patched, from its usual config on the meta device,
or on the CPU where values count.

A layer is in floating point silently if a softmax or an attention function of PyTorch runs in it, and ``qflash.coverage``
does not say so. The exit status is 1 if there is one, or a model that fails only where it is patched.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
import math
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.overrides import TorchFunctionMode

import qflash
from qflash.integrations import adapter, inspection
from qflash.integrations.inspection import attends

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "model_survey.json"


class FloatAttention(TorchFunctionMode):
    """Notes from which modules a softmax or one of PyTorch's attention functions is called."""

    def __init__(self) -> None:
        self.callers: dict[int, nn.Module] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("softmax", "scaled_dot_product_attention") and not Recorder.busy:
            module = self._caller()
            if module is not None:
                self.callers[id(module)] = module
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _caller() -> nn.Module | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            module = frame.f_locals.get("self", frame.f_locals.get("module"))
            if isinstance(module, nn.Module) and not isinstance(module, nn.Softmax):
                return module
            frame = frame.f_back
        return None


class Recorder:
    """Stands for qflash.attention and notes the SQNR of each call against float64 attention."""

    busy = False

    def __init__(self) -> None:
        self.sqnr: list[float] = []

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        Recorder.busy = True
        try:
            return self.measure(*args, **options)
        finally:
            Recorder.busy = False

    def measure(self, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        out = qflash.attention(query, key, value, attn_mask, **options)
        if query.is_meta:
            return out
        wide = query.double(), key.double(), value.double()
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.double()
        kept = {name: options[name] for name in ("is_causal", "scale", "enable_gqa") if name in options}
        exact = nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask, **kept)
        # a row with no key is zero here and NaN there
        exact = exact.nan_to_num()
        noise = (exact - out.double()).square().sum()
        if noise > 0 and exact.square().sum() > 0:
            self.sqnr.append(10 * math.log10(exact.square().sum() / noise))
        return out


def tensors_of(out: Any) -> Iterator[torch.Tensor]:
    """Return the float tensors in an output."""
    if isinstance(out, torch.Tensor):
        if out.dtype.is_floating_point:
            yield out
    elif isinstance(out, dict):
        for each in out.values():
            yield from tensors_of(each)
    elif isinstance(out, (tuple, list)):
        for each in out:
            yield from tensors_of(each)


def output_sqnr(exact: Any, got: Any) -> float | None:
    """Return the SQNR of a model's first output in decibels."""
    a, b = next(tensors_of(exact), None), next(tensors_of(got), None)
    if a is None or b is None or a.shape != b.shape or a.is_meta:
        return None
    a, b = a.double(), b.double()
    noise, signal = (a - b).square().sum().item(), a.square().sum().item()
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw weights anew that an initialisation leaves at zero or too small to tell whether they have an effect."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point or parameter.numel() == 0:
            continue
        if parameter.dim() > 1 and parameter.abs().max() == 0:
            parameter.normal_(0.0, 0.02, generator=generator)
        if "bias_table" in name or "attention_biases" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        elif parameter.numel() == max(parameter.shape, default=1) and parameter.abs().max() < 1e-3:
            # scales of norms and layers, and biases, of which many begin at 0 or 1e-6
            parameter.normal_(0.5 if name.endswith(("weight", "gamma")) else 0.0, 0.1, generator=generator)


def call_with_one(x: torch.Tensor, model: nn.Module) -> Any:
    """Run a model that takes one tensor."""
    return model(x)


def run_patched(model: nn.Module, call: Callable[[nn.Module], Any], exact: Any = None) -> dict[str, Any]:
    """Run a model in floating point and patched; returns the layers, both outputs' SQNR and what was silent.

    Args:
        model: the model.
        call: runs it.
        exact: the output in floating point where that is known.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = call(model) if exact is None else exact
        recorder = Recorder()
        try:
            qflash.patch(model)
        except ValueError as error:
            with FloatAttention() as seen:
                call(model)
            silent = sorted({type(module).__name__ for module in seen.callers.values() if is_silent(module)})
            return {"layers": {}, "error": str(error)[:300], "silent": silent}
        with mock.patch.object(adapter, "attention", recorder), FloatAttention() as seen:
            got = call(model)
    report = qflash.coverage(model)
    names = {id(module): name for name, module in model.named_modules()}
    named = {layer.name for layer in report.floating}
    silent = sorted(
        {type(module).__name__ for key, module in seen.callers.items() if names.get(key) not in named and is_silent(module)}
        - {f"QFlash{layer.kind}" for layer in report if layer.forms_weights}
    )
    layers: dict[str, dict[str, Any]] = {}
    for layer in report:
        module = dict(model.named_modules())[layer.name]
        base = getattr(type(module), "_qflash_base", type(module))
        key = f"{base.__module__}:{base.__name__}"
        entry = layers.setdefault(key, {"layers": 0, "integer": 0, "route": layer.route, "reasons": []})
        entry["layers"] += 1
        entry["integer"] += layer.is_integer
        if layer.route not in (None, "adapter") and layer.integer_calls + layer.float_calls == 0:
            entry["not_called"] = entry.get("not_called", 0) + 1
        if layer.reason and layer.reason not in entry["reasons"]:
            entry["reasons"].append(layer.reason)
    finite = recorder.sqnr
    return {
        "layers": layers,
        "calls": len(finite),
        "attention_sqnr": round(sum(finite) / len(finite), 1) if finite else None,
        "least_sqnr": round(min(finite), 1) if finite else None,
        "output_sqnr": None if (value := output_sqnr(exact, got)) is None else round(value, 1),
        "silent": silent,
    }


NO_ATTENTION = {
    "DFineIntegral": "bins of a box's edges",
    "DFineLQE": "bins of a box's edges",
    "Deimv2Integral": "bins of a box's edges",
    "Deimv2LQE": "bins of a box's edges",
    "EfficientLoFTRForKeypointMatching": "confidences of pairs of points",
    "LogBinomialSoftmax": "bins of depth",
    "MgpstrA3Module": "weights of characters, without queries",
    "SLANeXtSLAHead": "probabilities of a table's tokens",
    "SLANetSLAHead": "probabilities of a table's tokens",
    "Sam2MultiScaleAttention": "weights besides those of the function it looks up, which are thrown away",
    "PPOCRV5MobileRecHead": "probabilities of characters",
    "PPOCRV5ServerRecHead": "probabilities of characters",
    "PPOCRV6SmallRecHead": "probabilities of characters",
    "PPOCRV6TinyRecHead": "probabilities of characters",
    "SuperPointInterestPointDecoder": "scores of points",
}
"""Modules with a softmax that is not one of an attention, as read in their source."""


def is_silent(module: nn.Module) -> bool:
    """Tell whether a softmax in a module is one of an attention that nobody names."""
    base = getattr(type(module), "_qflash_base", type(module))
    return base.__name__ not in NO_ATTENTION


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave weights as they are: on the meta device there are none."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    with torch.device("meta"):
        patches = [mock.patch.object(nn.init, name, lambda tensor, *_, **__: tensor) for name in names]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


class Store:
    """The results, written as they come."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {} if fresh or not path.exists() else json.loads(path.read_text())
        self.changes = 0

    def section(self, name: str) -> dict[str, Any]:
        return self.data.setdefault(name, {})

    def put(self, section: str, key: str, value: Any) -> None:
        self.section(section)[key] = value
        self.changes += 1
        if self.changes % 20 == 0:
            self.write()

    def write(self) -> None:
        for name, each in self.data.items():
            if isinstance(each, dict):
                self.data[name] = dict(sorted(each.items()))
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def bar(what: str, names: list[str]) -> Iterator[str]:
    """Go through names with a progress bar on standard error."""
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=len(names))
        for name in names:
            progress.update(task, description=f"{what}: {name[:50]}")
            yield name
            progress.advance(task)


# --- timm


def timm_classes(names: list[str], store: Store) -> None:
    """Look up the classes of attention of every architecture."""
    import timm

    known = store.section("timm_architectures")
    for name in bar("timm, on the meta device", [name for name in names if name not in known]):
        try:
            with without_initialisation():
                model = timm.create_model(name)
        except Exception as error:
            store.put("timm_architectures", name, {"error": f"{type(error).__name__}: {error}"[:200]})
            continue
        classes = sorted({f"{type(each).__module__}:{type(each).__name__}" for each in model.modules() if attends(each)})
        size = sum(parameter.numel() for parameter in model.parameters())
        store.put("timm_architectures", name, {"parameters": size, "classes": classes})


def layouts(out: Any) -> list[tuple[Any, ...]]:
    """Return shapes, strides and types of the tensors in an output."""
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors_of(out)]


def run_architecture(name: str) -> dict[str, Any]:
    """Run an architecture of timm without memory for weights, in floating point and patched.

    Returns:
        layers, those of them in integers, and why it does not return what it does in floating point, None if it does. A model
        none of whose attention can be replaced stays as it is.
    """
    import timm

    with without_initialisation(), torch.no_grad():
        model = timm.create_model(name).eval()
        x = torch.empty(2, *model.pretrained_cfg.get("input_size", (3, 224, 224)))
        want = layouts(model(x))
        error = None
        try:
            qflash.patch(model)
            got = layouts(model(x))
            if got != want:
                error = f"{PATCHED_ONLY}: it returns {got} in place of {want}"
        except Exception as raised:
            refused = isinstance(raised, ValueError) and "holds no attention" in str(raised)
            error = None if refused else f"{PATCHED_ONLY}: {type(raised).__name__}: {raised}"
    report = qflash.coverage(model)
    return {"layers": len(report), "integer": len(report.integer), "error": error}


def run_architectures(names: list[str], store: Store) -> None:
    """Run every architecture with attention, patched."""
    done = store.section("timm_patched")
    attending = [name for name, entry in store.section("timm_architectures").items() if entry.get("classes") and name in names]
    for name in bar("timm, patched, on the meta device", [name for name in attending if name not in done]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run_architecture(name)
            result = found["error"] or f"{found['integer']} of {found['layers']}"
        except Exception as error:
            result = f"not run: {type(error).__name__}: {error}"
        store.put("timm_patched", name, result[:300])


SIZES = (64, 96, 112, 128, 192, 224, 256, 288, 384, 512)


def make_timm(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Build an architecture with random weights and an input, as small as it allows."""
    import timm

    torch.manual_seed(0)
    first: Exception | None = None
    usual = timm.get_pretrained_cfg(name, allow_unregistered=True)
    side = (usual.input_size if usual is not None else (3, 224, 224))[-1]
    for size in [*[each for each in SIZES if each < side], None]:
        try:
            model = timm.create_model(name, **({} if size is None else {"img_size": size})).eval()
            randomise(model)
            x = torch.randn(1, 3, size or side, size or side)
            with torch.no_grad():
                model(x)
            return model, x
        except Exception as error:
            first = first or error
            continue
    assert first is not None
    raise first


def survey_timm(names: list[str], store: Store) -> None:
    import timm

    store.data["timm"] = timm.__version__
    timm_classes(names, store)
    run_architectures(names, store)
    store.write()
    smallest: dict[tuple[str, ...], tuple[int, str]] = {}
    for name, entry in store.section("timm_architectures").items():
        if entry.get("classes"):
            key = tuple(entry["classes"])
            smallest[key] = min(smallest.get(key, (1 << 62, "")), (entry["parameters"], name))
    done = store.section("timm_runs")
    for name in bar("timm, run", [name for _, name in sorted(smallest.values()) if name in names and name not in done]):
        try:
            model, x = make_timm(name)
            result = run_patched(model, functools.partial(call_with_one, x))
            result["input"] = list(x.shape)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        store.put("timm_runs", name, result)


# --- torchvision

TORCHVISION: dict[str, tuple[dict[str, Any], int]] = {
    "vit_b_16": ({"image_size": 64}, 64),
    "swin_t": ({}, 64),
    "swin_v2_t": ({}, 64),
    "maxvit_t": ({}, 224),
}
"""Builders and sides of images; other architectures of torchvision's classification have no attention."""


def survey_torchvision(names: list[str], store: Store) -> None:
    import torchvision

    store.data["torchvision"] = torchvision.__version__
    done = store.section("torchvision_runs")
    for name in bar("torchvision", [name for name in TORCHVISION if name not in done and is_chosen(name, names)]):
        options, side = TORCHVISION[name]
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, **options).eval()
        randomise(model)
        x = torch.randn(1, 3, side, side)
        store.put("torchvision_runs", name, run_patched(model, functools.partial(call_with_one, x)))


# --- transformers

WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
IMAGES = {**WIDTH, "image_size": 32, "patch_size": 8}
WINDOWS = {"image_size": 28, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7}
AUDIO = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "ViTModel": IMAGES,
    "DeiTModel": IMAGES,
    "BeitModel": {**IMAGES, "use_relative_position_bias": True},
    "Data2VecVisionModel": {**IMAGES, "use_relative_position_bias": True},
    "CLIPVisionModel": IMAGES,
    "SiglipVisionModel": IMAGES,
    "Dinov2Model": IMAGES,
    "DINOv3ViTModel": IMAGES,
    "IJepaModel": IMAGES,
    "ViTMAEModel": IMAGES,
    "YolosModel": {**IMAGES, "image_size": [32, 32], "num_detection_tokens": 4},
    "SwinModel": WINDOWS,
    "Swinv2Model": WINDOWS,
    "DonutSwinModel": WINDOWS,
    "MaskFormerSwinModel": WINDOWS,
    "PvtModel": {"image_size": 64, "hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1]},
    "PvtV2Model": {"image_size": 64, "hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1]},
    "LevitModel": {"image_size": 64},
    "MobileViTModel": {"image_size": 64},
    "CvtModel": {},
    "SegformerModel": {},
    "GLPNModel": {},
    "VitDetModel": {**IMAGES, "use_relative_position_embeddings": True, "pretrain_image_size": 32},
    "SamVisionModel": {
        **IMAGES,
        "initializer_range": 0.02,
        "global_attn_indexes": [1],
        "window_size": 2,
        "output_channels": 16,
    },
    "HieraModel": {"image_size": [64, 64], "embed_dim": 24, "depths": [1, 1, 2, 1]},
    "BertModel": {**WIDTH, "vocab_size": 50},
    "RobertaModel": {**WIDTH, "vocab_size": 50},
    "DistilBertModel": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 96, "vocab_size": 50},
    "ModernBertModel": {**WIDTH, "vocab_size": 50, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2},
    "DebertaV2Model": {**WIDTH, "vocab_size": 50},
    "GPT2Model": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50},
    "LlamaModel": {**WIDTH, "num_key_value_heads": 1, "vocab_size": 50, "pad_token_id": 0},
    "MistralModel": {**WIDTH, "num_key_value_heads": 1, "vocab_size": 50, "pad_token_id": 0},
    "Qwen3Model": {**WIDTH, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 50, "pad_token_id": 0},
    "Gemma2Model": {**WIDTH, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 50, "pad_token_id": 0},
    "T5EncoderModel": {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2, "vocab_size": 50},
    "Wav2Vec2Model": {**WIDTH, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16},
    "HubertModel": {**WIDTH, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16},
    "ASTModel": {**WIDTH, "patch_size": 8, "max_length": 64, "num_mel_bins": 32},
    "WhisperModel": {**AUDIO, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16, "max_source_positions": 50},
}
"""Families that are run with random weights, and what makes them small."""


def inputs_of(model: Any, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        side = settings.get("image_size", 64)
        side = side[0] if isinstance(side, list) else side
        return {"pixel_values": torch.randn(2, 3, side, side, generator=generator)}
    if model.main_input_name == "input_features":
        tokens = torch.randint(3, 40, (2, 5), generator=generator)
        return {"input_features": torch.randn(2, 16, 100, generator=generator), "decoder_input_ids": tokens}
    if model.main_input_name == "input_values":
        shape = (2, settings["max_length"], settings["num_mel_bins"]) if "max_length" in settings else (2, 8000)
        return {"input_values": torch.randn(*shape, generator=generator)}
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 18:] = 0
    return {"input_ids": torch.randint(3, 50, (2, 24), generator=generator), "attention_mask": mask}


def by_name(name: str, settings: dict[str, Any], given: dict[str, torch.Tensor]) -> str:
    """Return what attn_implementation="integer" does with a family."""
    import transformers

    model_class = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = model_class._from_config(model_class.config_class(**settings), attn_implementation="integer").eval()
            with torch.no_grad(), FloatAttention() as seen:
                model(**given)
        except ValueError:
            return "refused"
    report = qflash.coverage(model)
    named = {layer.kind for layer in report.floating}
    silent = {type(each).__name__ for each in seen.callers.values() if is_silent(each)} - named
    if silent:
        return f"silent: {sorted(silent)}"
    return "yes" if not named else "warns" if len(report.floating) == len(report) else "in part, warns"


def first_input(model: Any) -> str:
    """Return the name of the input that a model, or a class of models, takes first."""
    return model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]


def list_vision_models() -> list[str]:
    """Return the names of all classes that take pixels first, as transformers' automatic classes choose them."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for table, classes in vars(modeling_auto).items():
        if table.startswith("MODEL_") and table.endswith("_MAPPING_NAMES"):
            for each in classes.values():
                names |= dict.fromkeys(each if isinstance(each, (tuple, list)) else (each,))
    found = []
    for name in names:
        try:
            if first_input(getattr(transformers, name)) in ("pixel_values", "pixel_values_videos"):
                found.append(name)
        except (AttributeError, ImportError):  # of other libraries that are not installed
            continue
    return sorted(found)


_KERNELS = {
    f"{way}_{ratio}ratio": [size, 1, size // 2]
    for way in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
    for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
}
_DETECTOR = {
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0], **_KERNELS},
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
_LCNET = {
    "model_type": "pp_lcnet_v4",
    "out_indices": [1, 2, 3, 4],
    "block_configs": [
        [[3, width, wider, stride, False]] for width, wider, stride in ((96, 96, 1), (96, 96, 2), (96, 192, 2), (192, 384, 2))
    ],
}
_REPVIT = {
    "model_type": "timm_wrapper",
    "architecture": "repvit_m1",
    "num_classes": 1000,
    "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]},
    "Blip2": {"image_token_index": 3},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "ConvNextBackbone": {"hidden_sizes": [96, 192, 384, 768]},
    "ConvNextV2Backbone": {"hidden_sizes": [96, 192, 384, 768]},
    "EdgeTamModel": {"vision_config": {"backbone_config": _REPVIT}},
    "EdgeTamVideo": {"vision_config": {"model_type": "edgetam_vision_model", "backbone_config": _REPVIT}},
    "EdgeTamVision": {"backbone_config": _REPVIT},
    "FocalNetBackbone": {"hidden_sizes": [192, 384, 768, 768]},
    "HieraForPreTraining": {"decoder_hidden_size": 512, "decoder_depth": 2, "decoder_num_heads": 16},
    "InstructBlip": {"image_token_index": 3},
    "InstructBlipVideo": {"video_token_index": 3},
    "LwDetrForObjectDetection": {"projector_scale_factors": [1.0]},
    "LwDetrModel": {"projector_scale_factors": [1.0]},
    "PPDocLayoutV2": {"class_thresholds": [0.5, 0.5], "class_order": [0, 1]},
    "PPOCRV5ServerDet": _DETECTOR,
    "PPOCRV6MediumDet": {**_DETECTOR, "backbone_config": _LCNET},
    "PPOCRV6SmallDet": {"backbone_config": _LCNET, "layer_list_out_channels": [96, 96, 192, 384]},
    "Sapiens2For": {"head_config": {"upsample_out_channels": [64, 64], "conv_out_channels": [64]}},
    "TimmBackbone": {"backbone": "resnet18"},
    "TimmWrapper": {"architecture": "vit_tiny_patch16_224"},
    "UVDocModel": {"backbone_config": {"model_type": "uvdoc_backbone", "out_indices": [1, 2, 3, 4, 5, 6]}},
    "VitMatte": {"hidden_size": 768, "fusion_hidden_sizes": [256, 128, 64, 32], "convstream_hidden_sizes": [48, 96, 192]},
}
"""What a usual config lacks to be built and run, by the beginning of the model's name."""
LARGE = 350e6
"""Parameters above which a model that is run on the CPU gets two layers for each of its numbers of layers."""
PATCHED_ONLY = "it fails only where it is patched"
LONGEST = 240
"""Seconds that a model may take on the CPU."""


def parts_of(config: Any) -> Iterator[Any]:
    """Return a config and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from parts_of(part)


def field(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of the named fields that a config or one of its parts sets."""
    found = (getattr(part, name, None) for part in parts_of(config) for name in names)
    return next((value for value in found if value is not None), default)


def sides_of(config: Any) -> list[tuple[int, int]]:
    """Return heights and widths of images to try: those of the config first."""
    known = [getattr(part, name, None) for part in parts_of(config) for name in ("image_size", "pretrain_image_size")]
    sizes: list[Any] = [(size["height"], size["width"]) if isinstance(size, dict) else size for size in known if size]
    pairs = [(size, size) if isinstance(size, int) else (tuple(size) * 2)[-2:] for size in sizes]
    usual = [(224, 224), (336, 336), (48, 320), (96, 640), (256, 256), (512, 512), (640, 640), (1024, 1024), (1536, 1536)]
    return list(dict.fromkeys([*pairs, *[(min(pair), min(pair)) for pair in pairs], *usual]))


def packed(config: Any, make: Callable[..., torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Return patches of two images in one row and the images' sizes in patches, in the forms that vision towers take."""
    patch, merge = field(config, "patch_size", default=14), field(config, "spatial_merge_size", default=1)
    channels = field(config, "num_channels", "in_channels", default=3)
    frames = field(config, "temporal_patch_size", "patch_temporal", default=1)
    grid = torch.tensor([[1, 8, 8], [1, 8, 12]])
    rest = {"grid_thw": grid, "merge_sizes": torch.tensor([2, 2])}
    yield {**rest, "pixel_values": make(160, channels * frames * patch * patch)}
    yield {**rest, "pixel_values": make(160, channels, patch, patch)}
    tokens = {"image_grid_thw": grid // torch.tensor([1, merge, merge])}
    yield {**tokens, "pixel_values": make(160 // merge**2, patch * merge, patch * merge, channels)}
    # one row of patches for each image, with padding
    sizes = torch.tensor([[8, 8], [8, 12]])
    image_mask = torch.tensor([[1] * 64 + [0] * 32, [1] * 96])
    rest = {"spatial_shapes": sizes, "pixel_attention_mask": image_mask}
    yield {**rest, "pixel_values": make(2, 96, channels * patch * patch)}
    # all patches side by side in one image
    yield {"target_sizes": sizes, "pixel_values": make(1, channels, patch, 160 * patch)}


def prompts(config: Any) -> dict[str, torch.Tensor]:
    """Return what is asked for beside an image: a box, and texts of 8 tokens after those that stand for the image."""
    count = field(config, "num_query_tokens", "latent_query_num", default=0)
    count *= 4 if field(config, "video_token_index") else 1
    words = [5, 6, 7, 8, 9, 10, 11, 2]
    ids = torch.tensor([[field(config, "image_token_index", "video_token_index", default=3)] * count + words])
    text, three = torch.tensor([words]), torch.tensor([words] * 3)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_embeds_position_mask": (torch.arange(ids.shape[1]) < count)[None],
        "decoder_input_ids": text,
        "qformer_input_ids": text,
        "input_boxes": torch.tensor([[[0.5, 0.5, 0.2, 0.3]]]),
        "input_boxes_labels": torch.tensor([[1]]),
        "task_inputs": torch.tensor([words + [0] * (field(config, "task_seq_len", default=8) - 8)]),
        "classes_input_ids": three,
        "classes_attention_mask": torch.ones_like(three),
        "tasks_input_ids": text,
        "tasks_attention_mask": torch.ones_like(text),
        "classes_structure": torch.tensor([3]),
    }


def track(model: Any, video: torch.Tensor) -> Any:
    """Track an object through a video by a point on the first image, or by a text."""
    module = sys.modules[type(model).__module__]
    session = next(each for name, each in vars(module).items() if name.endswith("InferenceSession"))
    session = session(video, *video.shape[-2:], dtype=video.dtype)
    if hasattr(session, "add_prompt"):
        place = session.add_prompt("words")
        session.prompt_input_ids[place] = torch.tensor([[5, 6, 7, 8] + [1] * 28])
        session.prompt_attention_masks[place] = torch.tensor([[1] * 4 + [0] * 28])
    else:
        place = session.obj_id_to_idx(1)
        point = {"point_coords": torch.tensor([[[[60.0, 60.0]]]]), "point_labels": torch.tensor([[[1]]], dtype=torch.int32)}
        session.add_point_inputs(place, 0, point)
        session.obj_with_new_inputs = [1]
    return [model(inference_session=session, frame_idx=frame) for frame in range(len(video))]


def calls_of(model: Any) -> Iterator[Callable[[Any], Any]]:
    """Return calls of a model to try: on an image, a pair, a video or packed patches, with what else its forward asks for.

    Tensors are on the model's device.
    """
    asked = {name: each.default is each.empty for name, each in inspect.signature(model.forward).parameters.items()}
    config, device = model.config, model.device
    generator = torch.Generator().manual_seed(1)
    channels = field(config, "num_channels", "in_channels", default=3)
    main = first_input(model)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=None if device.type == "meta" else generator, device=device)

    def call_with(given: dict[str, Any]) -> Callable[[Any], Any]:
        wanted = {name for name, is_needed in asked.items() if is_needed or name == "task_inputs"}
        if "input_ids" in asked:
            wanted |= {"input_ids", "attention_mask", "image_embeds_position_mask"}
        elif "decoder_input_ids" in asked:
            wanted |= {"decoder_input_ids"}
        if "input_boxes_labels" in asked:
            wanted |= {"input_boxes", "input_boxes_labels"}
        extra = {name: each for name, each in prompts(config).items() if name in wanted and name in asked}
        given = {**extra, **given}
        given = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in given.items()}

        def call(model: Any) -> Any:
            torch.manual_seed(0)
            return model(**given)

        return call

    if asked.keys() & {"grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes"}:
        for given in packed(config, make):
            if given.keys() <= {*asked, "pixel_values", "merge_sizes"}:
                yield call_with({name: each for name, each in given.items() if name in asked})
    sides = sides_of(config)
    frames = field(config, "num_frames", "frames_per_clip", default=16)
    shapes: list[tuple[tuple[int, ...], tuple[int, int]]] = [((1,), side) for side in sides]
    shapes += [(lead, side) for side in sides[:2] for lead in ((1, 2), (1, frames), (1, 4))]
    for lead, side in shapes:
        if "inference_session" in asked:
            video = make(2, channels, *side)
            yield functools.partial(track, video=video)
            continue
        pixels = make(*lead, channels, *side)
        given = {main: pixels}
        if "prompt_pixel_values" in asked:
            given |= {"prompt_pixel_values": pixels, "prompt_masks": pixels}
        if asked.get("bool_masked_pos"):
            patch = field(config, "patch_size")
            tokens = (side[0] // patch) * (side[1] // patch) * (lead[-1] // field(config, "tubelet_size", default=1))
            given["bool_masked_pos"] = (torch.arange(tokens) % 2 == 0)[None]
        yield call_with(given)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where the body takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def keep_two_layers(config: Any) -> None:
    """Set all numbers of layers in a config to two at most."""
    for part in parts_of(config):
        for name in ("num_hidden_layers", "num_layers", "depth", "layers", "encoder_layers", "decoder_layers"):
            if isinstance(depth := getattr(part, name, None), int):
                setattr(part, name, min(depth, 2))
        if getattr(part, "layer_types", None):
            part.layer_types = [part.layer_types[0], part.layer_types[-1]]


def build_usual(name: str, device: str) -> Any:
    """Build a model from its usual config, on the CPU with random weights and, where it is large, with fewer layers."""
    import transformers

    model_class = getattr(transformers, name)
    options: dict[str, Any] = {}
    for beginning, each in OPTIONS.items():
        options |= each if name.startswith(beginning) else {}
    config = model_class.config_class(**options)
    with without_initialisation():
        model = model_class._from_config(config)
    if device == "cpu":
        if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
            keep_two_layers(config)
        torch.manual_seed(0)
        model = model_class._from_config(config)
        randomise(model)
    return model.eval()


def working_call(model: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return the first call that a model in floating point takes, and its result; raises the first error if there is none."""
    first: Exception | None = None
    # some keep what they worked out before, and would not attend again
    trial = copy.deepcopy(model)
    for call in calls_of(model):
        try:
            with torch.no_grad():
                return call, call(trial)
        except TimeoutError:
            raise
        except Exception as error:
            first = first or error
    raise first or ValueError("no inputs")


def run_usual(name: str) -> dict[str, Any]:
    """Build a model from its usual config, patch it and run it: without memory for weights, or else on the CPU."""
    result: dict[str, Any] = {}
    for device in ("meta", "cpu"):
        model = None
        try:
            with time_limit(LONGEST), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = build_usual(name, device)
                with torch.device(device):
                    call, exact = working_call(model)
        except Exception as error:
            built = "" if model is not None else "not built: "
            text = " ".join(f"{type(error).__name__}: {error}".replace(name, "it").split())
            result = {"error": f"{built}{text.partition('. ')[0]}"[:160]}
            continue
        try:
            with time_limit(LONGEST), torch.device(device):
                return {**run_patched(model, call, exact), "device": device}
        except TimeoutError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            return {"error": f"{PATCHED_ONLY}: {type(error).__name__}: {error}"[:300]}
    return result


def survey_transformers(names: list[str], store: Store) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    store.data["transformers"] = transformers.__version__
    qflash.register_attention()
    done = store.section("transformers_runs")
    for name in bar("transformers", [name for name in SMALL if name not in done and is_chosen(name, names)]):
        model_class = getattr(transformers, name, None)
        if model_class is None:
            continue
        try:
            torch.manual_seed(0)
            model = model_class(model_class.config_class(**SMALL[name])).eval()
            randomise(model)
            given = inputs_of(model, SMALL[name])

            def call(model: nn.Module, given: dict[str, torch.Tensor] = given) -> Any:
                torch.manual_seed(0)
                return model(**given)

            result = run_patched(model, call)
            result["by_name"] = by_name(name, SMALL[name], given)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        store.put("transformers_runs", name, result)
    done = store.section("transformers_meta")
    for name in bar("transformers, on the meta device", list_vision_models()):
        if name in done or not is_chosen(name, names):
            continue
        store.put("transformers_meta", name, run_usual(name))


def is_chosen(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


# --- tables

PAGE = ROOT / "docs" / "models.md"
REAL = ROOT / "benchmarks" / "results" / "real_cpu.json"
NOT_TOKENS = (inspection._CHANNELS, inspection._LINEAR, inspection._GATE, inspection._BATCH)
"""Reasons of classes whose softmax is not over the scores of tokens."""


def reason_of(name: str) -> str | None:
    """Return why a class, as "module:Class", is not patched."""
    return inspection.NOT_REPLACED.get(name)


def count_timm(data: dict[str, Any]) -> tuple[int, int, int]:
    """Count timm's architectures: all, with a softmax over tokens, and of these with all of them in integers."""
    runs: dict[str, bool] = {}
    for entry in data["timm_runs"].values():
        for name, layer in (entry.get("layers") or {}).items():
            runs[name] = runs.get(name, True) and layer["integer"] == layer["layers"]
    tokens = integer = 0
    for entry in data["timm_architectures"].values():
        kinds = [name for name in entry.get("classes", ()) if reason_of(name) not in NOT_TOKENS]
        tokens += bool(kinds)
        integer += bool(kinds) and all(runs.get(name, False) for name in kinds)
    return len(data["timm_architectures"]), tokens, integer


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def timm_table(data: dict[str, Any]) -> list[str]:
    everywhere = [name for entry in data["timm_architectures"].values() for name in entry.get("classes", ())]
    lines = [
        "| Class in timm | Architectures | Route | Run | Attention, dB | Least | Output, dB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(set(everywhere)):
        nothing: tuple[str, dict[str, Any]] = ("", {})
        run, entry = next(
            ((run, each) for run, each in data["timm_runs"].items() if name in (each.get("layers") or {})), nothing
        )
        layer = (entry.get("layers") or {}).get(name, {})
        reason = reason_of(name) or "; ".join(layer.get("reasons", ()))
        shown = name.removeprefix("timm.").removeprefix("models.").removeprefix("layers.").replace(":", ".")
        if reason:
            lines.append(f"| {shown} | {everywhere.count(name)} | float: {reason} | | | | |")
            continue
        values = [number(entry.get(key)) for key in ("attention_sqnr", "least_sqnr", "output_sqnr")]
        lines.append(f"| {shown} | {everywhere.count(name)} | {layer.get('route', 'not run')} | {run} | {' | '.join(values)} |")
    return lines


def run_table(runs: dict[str, Any], with_name: bool) -> list[str]:
    head = ["Model", "Class", "Route by `qflash.patch`"] + ['`attn_implementation="integer"`'] * with_name
    lines = [f"| {' | '.join([*head, 'Attention, dB', 'Least', 'Output, dB'])} |", "|" + "---|" * (len(head) + 3)]
    for name, entry in runs.items():
        if entry.get("error"):
            continue
        kinds = [kind.partition(":")[2] for kind in entry["layers"]]
        routes = [
            layer["route"] if not layer["reasons"] else f"float: {'; '.join(layer['reasons'])}"
            for layer in entry["layers"].values()
        ]
        cells = [name, ", ".join(kinds), ", ".join(dict.fromkeys(routes))] + [entry.get("by_name", "")] * with_name
        values = [number(entry.get(key)) for key in ("attention_sqnr", "least_sqnr", "output_sqnr")]
        lines.append(f"| {' | '.join(cells + values)} |")
    return lines


def meta_table(data: dict[str, Any]) -> list[str]:
    runs = data["transformers_meta"]
    floats: dict[str, list[str]] = {}
    errors: dict[str, list[str]] = {}
    idle: list[str] = []
    whole = none = values = 0
    for name, entry in runs.items():
        error = entry.get("error")
        values += entry.get("device") == "cpu"
        if error and "holds no attention" in error:
            none += 1
        elif error:
            errors.setdefault(error, []).append(name)
        else:
            left = {(kind, text) for kind, layer in entry["layers"].items() for text in layer["reasons"]}
            whole += not left
            idle += [name] * any(layer.get("not_called") for layer in entry["layers"].values())
            for kind, text in sorted(left):
                floats.setdefault(f"{kind.partition(':')[2]}: {text}", []).append(name)
    unknown = sum(len(names) for names in errors.values())
    sentence = (
        f"{len(runs)} vision models of transformers, from their usual configs, completed where these lack a value: "
        f"{len(runs) - values - unknown} without memory for weights and {values} with random weights on a CPU, there with two "
        f"layers of each kind if they have more than {LARGE / 1e6:.0f} million parameters. {whole} are wholly in integers, "
        f"{none} have no attention, {len(runs) - whole - none - unknown} keep some in floating point, {unknown} were not run. "
    )
    if idle:
        sentence += f"Some layers were not called in {' and '.join(idle)}. "
    lines = [
        *textwrap.wrap(sentence + "Attention stays in floating point in:", 118),
        "",
        "| Class and reason | Models |",
        "|---|---|",
    ]
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(floats.items())]
    if errors:
        lines += ["", "| Not run | Models |", "|---|---|"]
        lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(errors.items())]
    return lines


def recipe_table() -> list[str]:
    """Return what ``qflash-lab real`` measured of each recipe."""
    rows: dict[str, dict[str, str]] = {}
    for entry in json.loads(REAL.read_text())["networks"]:
        text = f"{entry['layer_min_db']:.1f} to {entry['layer_max_db']:.1f}; {entry['sqnr_db']:.1f}"
        rows.setdefault(entry["network"], {})[entry["method"]] = text
    methods = {"`PAPER`": "qflash-paper", "`DEFAULT`": "qflash-default", "`ACCURATE`": "qflash-accurate"}
    lines = [f"| Layers; output, dB | {' | '.join(methods)} |", "|---|---|---|---|"]
    return lines + [f"| {name} | {' | '.join(cells[each] for each in methods.values())} |" for name, cells in rows.items()]


def tables(data: dict[str, Any]) -> dict[str, str]:
    """Return the generated parts of docs/models.md by their names."""
    everything, tokens, integer = count_timm(data)
    share = f"{100 * integer / tokens:.1f}"
    sentence = (
        f"timm {data['timm']} registers {everything} architectures. {tokens} have attention with a softmax over tokens; in "
        f"{integer} of these ({share} %) all of it runs in integers. All {len(data['timm_patched'])} with modules that attend "
        "were run patched without memory for weights, two images each, and return the shapes, types and memory layouts that "
        "they return unpatched."
    )
    return {
        "recipes": "\n".join(recipe_table()),
        "timm": "\n".join([*textwrap.wrap(sentence, 118), "", *timm_table(data)]),
        "torchvision": "\n".join(run_table(data["torchvision_runs"], False)),
        "transformers": "\n".join(run_table(data["transformers_runs"], True)),
        "transformers-meta": "\n".join(meta_table(data)),
    }


def blocks() -> dict[str, list[str]]:
    """Return the page's generated parts, line by line, by their markers' names."""
    return {f"survey:{name}": table.split("\n") for name, table in tables(json.loads(RESULTS.read_text())).items()}


def files() -> set[str]:
    """Return the names of the result files that the parts are made of."""
    return {RESULTS.name, "real_cpu.json"}


def write_page(tables: Mapping[str, str]) -> None:
    """Write the generated parts of docs/models.md, by their names."""
    text = PAGE.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- survey:{name} -->\n", "\n<!-- end -->"
        first = text.index(begin) + len(begin)
        text = text[:first] + table + text[text.index(end, first - 1) :]
    PAGE.write_text(text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--only", choices=("timm", "torchvision", "transformers"), action="append")
    parser.add_argument("--fresh", action="store_true", help="forget what was recorded")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the tables of docs/models.md, and run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        write_page(tables(json.loads(given.output.read_text())))
        return 0
    store = Store(given.output, given.fresh)
    chosen = given.only or ["timm", "torchvision", "transformers"]
    if "timm" in chosen:
        import timm

        survey_timm([name for name in timm.list_models() if is_chosen(name, given.names)], store)
    if "torchvision" in chosen:
        survey_torchvision(given.names, store)
    if "transformers" in chosen:
        survey_transformers(given.names, store)
    store.write()
    silent = [
        name
        for section in ("timm_runs", "torchvision_runs", "transformers_runs", "transformers_meta")
        for name, entry in store.section(section).items()
        if entry.get("silent") or "silent" in entry.get("by_name", "")
    ]
    print(f"{len(silent)} models with attention in floating point that is not named{': ' * bool(silent)}{', '.join(silent)}")
    broken = [name for name, entry in store.section("transformers_meta").items() if PATCHED_ONLY in entry.get("error", "")]
    broken += [name for name, result in store.section("timm_patched").items() if PATCHED_ONLY in result]
    print(f"{len(broken)} models that run only where they are not patched{': ' * bool(broken)}{', '.join(broken)}")
    return bool(silent or broken)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
