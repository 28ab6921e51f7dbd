"""The code of tutorials and explanations runs from top to bottom, as it is printed; a model of a hub is a small one here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs"
NEEDS = {
    "explanation/bounds": ("qflash_lab",),
    "tutorials/attention": ("timm",),
    "tutorials/clip_search": ("transformers", "torchvision"),
    "tutorials/from_openvino": ("timm", "onnxruntime"),
    "tutorials/from_torchao": ("timm",),
    "tutorials/network_to_onnx": ("timm", "sklearn", "onnxruntime", "qflash_lab"),
}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="only the repository has the documents")


def small_clip(folder: Path) -> None:
    """Write a CLIP of two layers with its processor, and photos."""
    transformers = pytest.importorskip("transformers")
    from PIL import Image
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor

    folder.mkdir()
    characters = [chr(code) for code in range(33, 127)]
    words = [*characters, *(f"{one}</w>" for one in characters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    transformers.CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    texts = {"vocab_size": len(words), "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**layers, **texts}, vision_config={**layers, "image_size": 32, "patch_size": 8}, projection_dim=32
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    photos = Path("photos")
    photos.mkdir()
    noise = torch.randint(0, 256, (32, 4, 5, 3), dtype=torch.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels.numpy()).resize((50, 40)).save(photos / f"{number:02}.jpg")


def test_every_tutorial_is_run() -> None:
    pages = [path for name in ("tutorials", "explanation") for path in (FOLDER / name).glob("*.md")]
    with_code = [path for path in pages if "```python" in path.read_text(encoding="utf-8")]
    assert sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in with_code) == sorted(NEEDS)


def check_attention(printed: str) -> None:
    """The page says about 1.5 %, and that recipes differ on a loud channel."""
    first, paper, default, accurate = (float(found) for found in re.findall(r"([\d.]+) %", printed))
    assert 1 <= first <= 2
    assert accurate < default < paper
    assert "2 of 2 attention layers in integers" in printed


def check_network(printed: str) -> None:
    """Integers lose at most two of 200 images, and the comparison names parts."""
    found = re.search(r"float (\d+) integers (\d+) of 200 right", printed)
    assert found is not None
    exact, rounded = map(int, found.groups())
    assert exact >= 180 and rounded >= exact - 2
    assert re.search(r"^blocks\.[01]\.\w+ +[\d.]+$", printed, re.MULTILINE)


def check_clip(printed: str) -> None:
    """Names of photos come back, and integers are close to floats."""
    assert len(re.findall(r"'\d\d\.jpg'", printed)) == 3
    assert "2 of 2 attention layers in integers" in printed
    assert float(printed.split()[-3]) > 0.99


CHECKS = {
    "tutorials/attention": check_attention,
    "tutorials/clip_search": check_clip,
    "tutorials/network_to_onnx": check_network,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert code
    if name == "tutorials/clip_search":
        small_clip(tmp_path / "clip")
        assert '"openai/clip-vit-base-patch32"' in code[0]
        code[0] = code[0].replace('"openai/clip-vit-base-patch32"', repr(str(tmp_path / "clip")))
    # what a page says of an earlier block holds for a later one
    names: dict[str, object] = {"__name__": name}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number, block in enumerate(code):
            exec(compile(block, f"{name}.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    if name in CHECKS:
        CHECKS[name](printed)
