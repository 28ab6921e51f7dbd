"""Quantise encoders of timm, torchvision and transformers as a whole with random weights, and record which are taken.

``python scripts/survey_networks.py [--fresh | --again] [NAME ...]``; names limit the models to those that contain one of
them. Results go to ``benchmarks/results/network_survey.json`` as they come: a run that was broken off goes on where it was.
``python scripts/survey_networks.py --table`` writes the tables of docs/models.md from that file.

A model has its full width and two blocks (two a stage), a small image, and random norms, biases, layer scales, position
embeddings and head, so that no part is too small to be seen in the output. Architectures of timm that are then alike are run
once. What is recorded is the SQNR of the output beside the float model, or why the model is refused.

The exit status is 1 if a model fails in another way than with a ValueError or TypeError of this package.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
import textwrap
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qflash
from qflash.network.coverage import drawn_images
from qflash_lab.evaluation.random_weights import randomise
from survey_models import Store, bar, is_chosen, time_limit, without_initialisation, write_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "network_survey.json"
MODULES = (
    "vision_transformer", "deit", "beit", "vision_transformer_relpos", "swin_transformer", "vision_transformer_hybrid", "eva",
    "cait", "xcit", "volo", "swin_transformer_v2", "swin_transformer_v2_cr", "vision_transformer_sam", "naflexvit", "pit",
    "crossvit", "convit", "tnt", "twins", "pvt_v2", "hiera", "nest", "mvitv2", "vitamin", "levit", "visformer", "davit",
    "qwen3_vit", "gemma4_vit", "deepseek_vit",
)  # fmt: skip
"""timm's modules of transformers."""
LARGEST = 600e6
"""Parameters of a model with two blocks."""
LONGEST = 1500
"""Seconds for a model."""
CLASSES = 10


def quantised(make: Callable[[], nn.Module], side: int, outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """Quantise a model; returns ``sqnr_db``, or ``refused`` and where, or ``error``, or why it was ``not_run``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = make().eval()
        randomise(model)
        images = drawn_images((3, side, side))
        try:
            with torch.no_grad():
                model(torch.zeros(2, 3, side, side))
        except Exception as error:
            return {"not_run": f"{type(error).__name__}: {error}"[:200]}
        try:
            with time_limit(LONGEST):
                network = qflash.quantize_model(model, [images], mean=[0.5] * 3, std=[0.5] * 3, min_sqnr=None, outputs=outputs)
        except TimeoutError:
            return {"not_run": f"more than {LONGEST} s"}
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = re.sub(r'"[^"]*site-packages/', '"', (str(error).splitlines() or [""])[0])[:600]
            place = f"{Path(last.filename).name}: {last.name}"
            if isinstance(error, (ValueError, TypeError)) and Path(last.filename).is_relative_to(Path(qflash.__file__).parent):
                return {"refused": text, "at": place}
            return {"error": f"{type(error).__name__}: {text}", "at": place}
    assert network.quality is not None
    return {"sqnr_db": round(network.quality.sqnr_db, 1), "nodes": len(network.nodes), "side": side}


def key_of(model: nn.Module, side: int) -> str:
    """Return a digest that models have in common which compute the same with other weights."""
    lines = [f"{type(model)} {side}"]
    for name, module in model.named_modules():
        constants = {k: x for k, x in vars(module).items() if isinstance(x, (bool, int, float, str, tuple))}
        lines.append(f"{name} {type(module)} {module.extra_repr()} {sorted(constants.items(), key=lambda item: item[0])}")
    lines += [f"{name} {tuple(x.shape)}" for name, x in (*model.named_parameters(), *model.named_buffers())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# --- timm


def options_of(name: str) -> tuple[dict[str, Any], int, nn.Module]:
    """Return what makes an architecture small, the side of its images, and the model without memory for weights."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    usual = config.input_size[-1] if config is not None else 224
    classes = {} if config is not None and config.num_classes == 0 else {"num_classes": CLASSES}
    first: Exception | None = None

    def build(**options: Any) -> nn.Module | None:
        nonlocal first
        try:
            with without_initialisation():
                return timm.create_model(name, **options)
        except Exception as error:
            first = first or error
            return None

    shortest: list[dict[str, Any]] = [{"depth": 2}, *({name: (2, 2, 2, 2)} for name in ("depths", "layers"))]
    shortest += [{"depths": (2, 2, 2)}, {}]
    for short in shortest:
        options = {**classes, **short}
        if not short and (model := build(**classes)) is not None and (heads := heads_of_keys(model)):
            short = {"depth": 2, "num_kv_heads": heads}
            options |= short
        if (model := build(**options)) is None:
            continue
        for side in sides_of(model, usual, "depth" not in short):
            smaller = build(**options, img_size=side)
            if smaller is not None:
                return {**options, "img_size": side}, side, smaller
        return options, usual, model
    assert first is not None
    raise first


def heads_of_keys(model: Any) -> tuple[int, ...]:
    """Return those of the first two blocks that differ in them, or of two, where a model is told them block by block."""
    found = [getattr(getattr(block, "attn", None), "num_kv_heads", 0) for block in getattr(model, "blocks", ())]
    return () if 0 in found else tuple((list(dict.fromkeys(found)) * 2)[:2])


def sides_of(model: Any, usual: int, has_stages: bool) -> list[int]:
    """Return sides of images to try, smaller than the usual one: four patches, or two windows in the second stage.

    Six patches where the model joins blocks of three by three tokens.
    """
    embedding = getattr(model if hasattr(model, "patch_embed") else getattr(model, "encoder", None), "patch_embed", None)
    patch = getattr(embedding, "patch_size", None)
    patch = patch[0] if isinstance(patch, (tuple, list)) else patch
    if not isinstance(patch, int) or hasattr(embedding, "backbone"):
        return []
    windows = [x for x in (getattr(module, "window_size", None) for module in model.modules()) if isinstance(x, tuple)]
    joined = [getattr(x, name, 0) for x in model.modules() for name in ("pooling_kernel_size", "downsample_ratio")]
    side = (6 if 3 in joined else 4) * patch
    if has_stages:
        if not windows:
            return []
        window = max(int(each) for x in windows for each in x)
        # the last stage has half a window, if that is a whole number
        side *= window if window % 2 == 0 else 2 * window
    return [side] if side < usual else []


def survey_timm(chosen: list[str], store: Store) -> None:
    import timm

    store.data["timm"] = timm.__version__
    known = store.section("timm_architectures")
    names = [(name, module) for module in MODULES for name in timm.list_models(module=module) if is_chosen(name, chosen)]
    modules = dict(names)
    for name in bar("timm, on the meta device", [name for name in modules if name not in known]):
        entry: dict[str, Any] = {"module": modules[name]}
        try:
            options, side, model = options_of(name)
            count = sum(x.numel() for x in model.parameters())
            entry |= {"options": options, "side": side, "parameters": count, "key": key_of(model, side)}
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:200]
        store.put("timm_architectures", name, entry)
    store.write()
    done = store.section("timm_runs")
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted((x for x in known if "key" in known[x]), key=lambda x: known[x]["parameters"]):
        alike[known[name]["key"]].append(name)
    # of every module some soon, those first that stand for most names
    left = [
        (key, names[0])
        for key, names in sorted(alike.items(), key=lambda item: -len(item[1]))
        if key not in done and known[names[0]]["parameters"] <= LARGEST and is_chosen(names[0], chosen)
    ]
    place: Counter[str] = Counter()
    rank = {}
    for key, name in left:
        place[known[name]["module"]] += 1
        rank[key] = place[known[name]["module"]]
    left.sort(key=lambda item: rank[item[0]])
    for name, (key, _) in zip(bar("timm", [name for _, name in left]), left, strict=True):
        options = {k: tuple(x) if isinstance(x, list) else x for k, x in known[name]["options"].items()}
        store.put(
            "timm_runs",
            key,
            {"name": name, **quantised(functools.partial(timm.create_model, name, **options), known[name]["side"])},
        )
        store.write()


# --- torchvision and transformers

VIT = {"b_16": (16, 12, 768, 3072), "b_32": (32, 12, 768, 3072), "l_16": (16, 16, 1024, 4096), "l_32": (32, 16, 1024, 4096),
       "h_14": (14, 16, 1280, 5120)}  # fmt: skip
"""Patch, heads, channels and those of the MLP."""
SWIN = {"t": (96, [3, 6, 12, 24]), "s": (96, [3, 6, 12, 24]), "b": (128, [4, 8, 16, 32])}
HF = (
    "ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher", "Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel",
    "Dinov2WithRegistersForImageClassification", "BeitModel", "BeitForImageClassification", "SiglipVisionModel",
    "SiglipForImageClassification", "SwinModel", "SwinForImageClassification", "Swinv2Model", "CLIPVisionModel",
    "CLIPVisionModelWithProjection", "CLIPForImageClassification", "ViTMSNModel", "ViTMSNForImageClassification", "IJepaModel",
    "DINOv3ViTModel", "Data2VecVisionModel",
)  # fmt: skip


Run = Callable[[], dict[str, Any]]


def torchvision_models() -> dict[str, Run]:
    """Return what quantises models of torchvision, by their names."""
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
    from torchvision.models.vision_transformer import VisionTransformer

    found: dict[str, Run] = {}
    for name, (patch, heads, width, inner) in VIT.items():
        sizes = (4 * patch, patch, 2, heads, width, inner)
        make = functools.partial(VisionTransformer, *sizes, num_classes=CLASSES)
        found[f"vit_{name}"] = functools.partial(quantised, make, 4 * patch)
    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    for name, (width, each) in SWIN.items():
        for prefix, side, window, more in (("swin", 224, 7, {}), ("swin_v2", 256, 8, second)):
            made_with = ([4, 4], width, [2] * 4, each, [window] * 2)
            make = functools.partial(SwinTransformer, *made_with, num_classes=CLASSES, **more)
            found[f"{prefix}_{name}"] = functools.partial(quantised, make, side)
    return found


def transformers_models() -> dict[str, Run]:
    """Return what quantises models of transformers, by their names; of some with one of their outputs, too."""
    import transformers

    transformers.logging.set_verbosity_error()
    found: dict[str, Run] = {}
    for name in HF:
        model_class = getattr(transformers, name, None)
        if model_class is None:
            continue
        config = model_class.config_class()
        visual = getattr(config, "vision_config", None) or config
        for part in {id(x): x for x in (config, visual, getattr(config, "text_config", None) or config)}.values():
            if hasattr(part, "depths"):
                part.depths = [2] * len(part.depths)
            else:
                part.num_hidden_layers = 2
                part.image_size = 4 * visual.patch_size
            part.use_relative_position_bias = name.startswith(("Beit", "Data2Vec"))
        config.num_labels = CLASSES
        make = functools.partial(model_class, config)
        found[name] = functools.partial(quantised, make, visual.image_size)
        if name in ("ViTModel", "DeiTModel"):
            last = ["last_hidden_state"]
            found[f"{name}, outputs={last}"] = functools.partial(quantised, make, visual.image_size, last)
    return found


def survey_others(library: str, runs: dict[str, Run], chosen: list[str], store: Store) -> None:
    """Quantise the models of a library that have no result yet."""
    store.data[library] = sys.modules[library].__version__
    done = store.section(f"{library}_runs")
    for name in bar(library, [name for name in runs if name not in done and is_chosen(name, chosen)]):
        store.put(f"{library}_runs", name, runs[name]())
        store.write()


# --- tables


def all_runs(data: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (library, module, result) of everything that was asked for."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    for name, entry in sorted(data["timm_architectures"].items(), key=lambda item: MODULES.index(item[1]["module"])):
        result = data["timm_runs"].get(entry.get("key"))
        if result is None:
            too_large = entry.get("parameters", 0) > LARGEST
            why = f"more than {LARGEST / 1e6:.0f} million parameters" if too_large else entry.get("error", "not yet")
            result = {"not_run": why}
        found.append(("timm", entry["module"], {**result, "name": name}))
    for library in ("torchvision", "transformers"):
        found += [(library, "", {**result, "name": name}) for name, result in data.get(f"{library}_runs", {}).items()]
    return found


def reason(text: str) -> str:
    """Return a refusal without names of submodules and places."""
    text = re.sub(r" \(File .*\)(?= has no integer form)", "", text)
    text = re.sub(r" in [\w.]+( has no integer form)", r"\1", text)
    text = re.sub(r" of [\w.]+( has no integer form)", r"\1", text)
    text = re.sub(r"(infinity is in) [\w.]+", r"\1 one", text)
    text = re.sub(r"(what \w+) of [\w.]+ computes", r"\1 computes", text)
    text = re.sub(r"; outputs=.* leaves it out$", "", text)
    text = text.replace(" has no integer form", "").partition(" (/")[0]
    return re.sub(r"\(?\[?\b\d[\d, .()\[\]]*", "... ", text).strip()[:110].replace("|", "/")


def tables(data: dict[str, Any]) -> dict[str, str]:
    """Return the generated parts of docs/models.md by their names."""
    runs = all_runs(data)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    why: Counter[str] = Counter()
    example: dict[str, str] = {}
    for library, module, result in runs:
        groups[library, module].append(result)
        if "refused" in result:
            text = reason(result["refused"])
            why[text] += 1
            example.setdefault(text, result["name"])
    taken = [result for library, _, result in runs if library == "timm" and "sqnr_db" in result]
    timm = [result for library, _, result in runs if library == "timm"]
    sentence = (
        f"timm {data['timm']} has {len(timm)} names in these modules. {len(taken)} are taken as a whole. "
        f"{sum('refused' in x for x in timm)} are refused with a message that names the operation, "
        f"{sum('not_run' in x for x in timm)} were not run. {len(data['timm_runs'])} architectures that differ were run. "
        "SQNR is of random weights and two blocks: it shows that every operation is converted, not how accurate a trained "
        "model is."
    )
    lines = ["| Module | Taken | Refused | Not run | SQNR, dB |", "|---|---|---|---|---|"]
    for (library, module), results in groups.items():
        values = sorted(x["sqnr_db"] for x in results if "sqnr_db" in x)
        shown = " to ".join(dict.fromkeys(f"{x:.0f}" for x in (values[:1] + values[-1:])))
        counts = [sum(kind in x for x in results) for kind in ("sqnr_db", "refused", "not_run")]
        lines.append(f"| {f'timm {module}' if module else library} | {' | '.join(map(str, counts))} | {shown} |")
    reasons = ["| Refused for | Names | For example |", "|---|---|---|"]
    reasons += [f"| {text} | {count} | {example[text]} |" for text, count in why.most_common()]
    return {"networks": "\n".join([*textwrap.wrap(sentence, 118), "", *lines]), "refused": "\n".join(reasons)}


def blocks() -> dict[str, list[str]]:
    """Return the page's generated parts, line by line, by their markers' names."""
    return {f"survey:{name}": table.split("\n") for name, table in tables(json.loads(RESULTS.read_text())).items()}


def files() -> set[str]:
    """Return the names of the result files that the parts are made of."""
    return {RESULTS.name}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--fresh", action="store_true", help="forget what was recorded")
    parser.add_argument("--again", action="store_true", help="forget which of the models were refused or not run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the tables of docs/models.md, and run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        write_page(tables(json.loads(given.output.read_text())))
        return 0
    store = Store(given.output, given.fresh)
    if given.again:
        for section in ("timm_runs", "torchvision_runs", "transformers_runs"):
            store.data[section] = {
                key: result
                for key, result in store.section(section).items()
                if "sqnr_db" in result or not is_chosen(result.get("name", key), given.names)
            }
    survey_others("torchvision", torchvision_models(), given.names, store)
    survey_others("transformers", transformers_models(), given.names, store)
    survey_timm(given.names, store)
    store.write()
    failed = [result for _, _, result in all_runs(store.data) if "error" in result]
    for result in failed:
        print(f"{result['name']}: {result['error']} ({result['at']})")
    print(f"{len(failed)} models fail with no message of this package")
    return bool(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
