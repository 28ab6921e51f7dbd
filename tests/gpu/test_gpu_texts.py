"""Integer networks of texts with padding on a GPU: Hopper's and the portable kernels, and CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch

import qflash

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

TOKENS, VOCABULARY, END = 77, 300, 299


def draw_texts(count: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 200, (count, TOKENS), generator=generator)
    ends = torch.randint(3, TOKENS, (count,), generator=generator)
    ids[torch.arange(count), ends] = END
    return {"input_ids": ids, "attention_mask": (torch.arange(TOKENS) <= ends[:, None]).long()}


@pytest.mark.parametrize("kind", ["Bert", "CLIPText"])
def test_texts_with_padding_have_the_reference_bits(kind: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
        max_position_embeddings=TOKENS, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}Model")(config).eval()
    network = qflash.quantize_model(model, [draw_texts(32, 1)], outputs=["last_hidden_state"], progress=False, min_sqnr=None)
    texts = draw_texts(8, 2)
    reference = copy.deepcopy(network)
    reference.backend = "reference"
    want = reference(**texts)
    moved = {name: x.cuda() for name, x in texts.items()}
    for backend in ("auto", "triton"):
        network.backend = backend
        network.cuda()
        assert torch.equal(network(**moved).cpu(), want)
    run = network.graph(8)
    assert torch.equal(run(**moved).cpu(), want) and torch.equal(run(texts).cpu(), want)
    for number, length in enumerate(texts["attention_mask"].sum(dim=1).tolist()[:3]):
        alone = network(moved["input_ids"][number : number + 1, :length])
        assert torch.equal(alone[0].cpu(), want[number, :length])


def embeds(found: object) -> torch.Tensor:
    # older versions of transformers return the tensor
    return found if isinstance(found, torch.Tensor) else found.pooler_output  # type: ignore[attr-defined]


def test_both_towers_of_a_clip_on_a_gpu() -> None:
    """The embeddings are the CPU's; similarities are floats of these."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "eos_token_id": END, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 64, "patch_size": 16})
    clip = transformers.CLIPModel(config).eval()
    pixels = torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8)
    texts = qflash.quantize_model(
        clip, [draw_texts(32, 1)], progress=False, min_sqnr=None,
        outputs=lambda model, ids, mask: embeds(model.get_text_features(input_ids=ids, attention_mask=mask)),
    )  # fmt: skip
    images = qflash.quantize_model(
        clip, [pixels], progress=False, min_sqnr=None, mean=[0.5] * 3, std=[0.5] * 3,
        outputs=lambda model, x: embeds(model.get_image_features(pixel_values=x)),
    )  # fmt: skip
    given = draw_texts(5, 2)
    model = qflash.zero_shot_model(images, texts, clip)
    want = model(pixel_values=pixels[:6], **given)
    moved = copy.deepcopy(model).cuda()
    found = moved(pixel_values=pixels[:6].cuda(), **{name: x.cuda() for name, x in given.items()})
    assert moved.device.type == "cuda" and found.logits_per_image.is_cuda
    for name in ("image_embeds", "text_embeds", "logits_per_image", "logits_per_text"):
        assert torch.allclose(getattr(found, name).cpu(), getattr(want, name), rtol=1e-5, atol=1e-5), name
