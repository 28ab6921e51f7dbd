"""Recognition of text lines for ``qflash-lab real``: PP-OCRv4 out of the package ``rapidocr``, on lines drawn by Pillow.

The network is a graph for onnxruntime with two attention layers of 8 heads of 15 channels. It is cut at both, so that any
attention can stand between the parts.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HEIGHT = 48
"""Of the images that the network takes, in pixels."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Cut:
    """Names of the tensors of one attention layer in a graph.

    Attributes:
        query, key, value: (batch, heads, tokens, channels); the query holds the factor of the scores.
        output: what takes their place, of the same shape.
    """

    query: str
    key: str
    value: str
    output: str


def find_cuts(graph: Any) -> list[Cut]:
    """Return the attention layers of an ONNX graph, in its order: softmax between two matrix products."""
    maker = {name: node for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        if node.op_type != "MatMul" or (softmax := maker.get(node.input[0])) is None or softmax.op_type != "Softmax":
            continue
        scores = maker[softmax.input[0]]
        transposed = maker[scores.input[1]]
        found.append(Cut(scores.input[0], transposed.input[0], node.input[1], node.output[0]))
    return found


def take_part(model: Any, given: Sequence[str], wanted: Sequence[str]) -> Any:
    """Return the part of an ONNX model that computes some tensors from others.

    Args:
        model: of the package onnx.
        given: float tensors of rank 4 that the part takes besides the model's inputs.
        wanted: float tensors that it returns.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    maker = {name: place for place, node in enumerate(graph.node) for name in node.output}
    needed: set[int] = set()
    open_names = list(wanted)
    while open_names:
        name = open_names.pop()
        place = None if name in given else maker.get(name)
        if place is not None and place not in needed:
            needed.add(place)
            open_names += graph.node[place].input
    nodes = [graph.node[place] for place in sorted(needed)]
    used = {name for node in nodes for name in node.input}
    inputs = [each for each in graph.input if each.name in used]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in given if name in used]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted]
    weights = [each for each in graph.initializer if each.name in used]
    part = helper.make_graph(nodes, graph.name or "part", inputs, outputs, weights)
    return helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)


class LineReader:
    """A recogniser of text lines, cut at its attention layers.

    Args:
        model: of the package onnx; its metadata hold the characters.

    Raises:
        ImportError: onnxruntime is not installed.
    """

    def __init__(self, model: Any) -> None:
        import onnxruntime

        graph = model.graph
        self.cuts = find_cuts(graph)
        # before the last softmax: scores are compared in decibels
        scores = next(node.input[0] for node in graph.node if graph.output[0].name in node.output)
        known: list[str] = []
        self._sessions = []
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        for wanted in (*((cut.query, cut.key, cut.value) for cut in self.cuts), (scores,)):
            content = take_part(model, known, wanted).SerializeToString()
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            self._sessions.append((session, {each.name for each in session.get_inputs()}))
            if len(known) < len(self.cuts):
                known.append(self.cuts[len(known)].output)
        self._image = graph.input[0].name
        characters = next(each.value for each in model.metadata_props if each.key == "character").splitlines()
        # 0 is "nothing", the last one a space
        self.characters = ["", *characters, " "]

    def scores(self, image: torch.Tensor, attend: Sequence[Attend]) -> torch.Tensor:
        """Return the scores of every character, float32 (steps, characters) on the CPU.

        Args:
            image: float32 (3, :data:`HEIGHT`, width).
            attend: one a layer; each gets query, key and value on the CPU, with the factor of the scores in the query.
        """
        feed = {self._image: image[None].numpy()}
        for cut, function, (session, names) in zip(self.cuts, attend, self._sessions, strict=False):
            found = session.run([cut.query, cut.key, cut.value], {k: v for k, v in feed.items() if k in names})
            feed[cut.output] = function(*map(torch.from_numpy, found)).float().contiguous().numpy()
        session, names = self._sessions[-1]
        return torch.from_numpy(session.run(None, {k: v for k, v in feed.items() if k in names})[0])[0]

    def text(self, scores: torch.Tensor) -> str:
        """Return what the scores say: the best character of each step, repetitions and nothing left out."""
        best = scores.argmax(1).tolist()
        return "".join(self.characters[c] for c, before in zip(best, [0, *best], strict=False) if c != before)


def load_line_reader(wheel: Path) -> LineReader:
    """Load PP-OCRv4's recogniser of Chinese and English.

    Args:
        wheel: of rapidocr.

    Raises:
        ImportError: onnx or onnxruntime is not installed.
    """
    import onnx

    with zipfile.ZipFile(wheel) as archive:
        return LineReader(onnx.load_from_string(archive.read("rapidocr/models/ch_PP-OCRv4_rec_infer.onnx")))


def draw_lines(texts: Sequence[str], seed: int = 0) -> list[torch.Tensor]:
    """Draw each text as one line, dark on light, of changing size and contrast, turned a little, with noise.

    Args:
        texts: Latin letters.
        seed: of what changes.

    Returns:
        float32 (3, :data:`HEIGHT`, width) in [-1, 1], the width as the text needs.

    Raises:
        ImportError: Pillow is not installed, or cannot draw letters of any size.
    """
    from PIL import Image, ImageDraw, ImageFont

    generator = torch.Generator().manual_seed(seed)
    found = []
    for text in texts:
        size, turn, light, dark = torch.rand(4, generator=generator, dtype=torch.float32, device="cpu").tolist()
        font = ImageFont.load_default(size=16 + 16 * size)
        left, top, right, bottom = font.getbbox(text)
        image = Image.new("L", (int(right - left) + 24, int(bottom - top) + 16), int(180 + 70 * light))
        ImageDraw.Draw(image).text((12 - left, 8 - top), text, font=font, fill=int(110 * dark))
        image = image.rotate(1.5 * turn - 0.75, Image.Resampling.BICUBIC, fillcolor=int(180 + 70 * light))
        image = image.resize((round(image.width * HEIGHT / image.height), HEIGHT), Image.Resampling.BICUBIC)
        pixels = torch.tensor(list(image.tobytes()), dtype=torch.float32, device="cpu").reshape(1, image.height, image.width)
        noise = torch.randn(pixels.shape, generator=generator, dtype=torch.float32, device="cpu")
        pixels = (pixels + 12.0 * noise).clamp(0.0, 255.0)
        found.append((pixels / 127.5 - 1.0).expand(3, -1, -1).contiguous())
    return found
