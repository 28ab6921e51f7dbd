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
