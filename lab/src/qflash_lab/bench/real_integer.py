"""A pretrained sentence model as an integer network on texts that calibration did not see, for ``qflash-lab real``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from qflash.network.quantize import quantize_model

from ..evaluation import probe, real_data
from ..evaluation.sentences import CALIBRATION, SENTENCES
from . import schema as col
from .metrics import sqnr
from .schema import Row
from .tables import Column

JUDGED = 24
"""Sentences that are judged: the first of the built-in ones."""
_NEIGHBOURS = 5

COLUMNS = (
    Column("network", "network"), Column("texts", "samples", "d"), Column("calibration texts", "calibration_texts", "d"),
    Column("embedding, dB", col.SQNR_DB, ".1f"), Column("cosine least", "cosine_min", ".5f"),
    Column("cosine mean", "cosine_mean", ".5f"), Column("nearest kept", "nearest_kept", "d"),
)  # fmt: skip
"""Of the table."""


def texts() -> tuple[list[str], list[str]]:
    """Return the texts that are judged, and those of calibration: the other sentences, and more. The paragraphs hold both."""
    return list(SENTENCES[:JUDGED]), [*SENTENCES[JUDGED:], *CALIBRATION]


@torch.inference_mode(False)
@torch.no_grad()
def measure_embeddings(
    model: real_data.SentenceModel, judged: Sequence[str], calibration: Sequence[str], *, name: str, device: torch.device
) -> Row:
    """Compare the embeddings of a sentence model's integer network with the model's own, float32 with exact attention.

    The network gives all tokens; their mean over the mask, and its division by its length, are floats in both.

    Args:
        model: its network with an attention of transformers' own.
        judged, calibration: texts.
        name: of the row.
        device: of the integer network.
    """
    ids, mask = model.tokens(calibration)
    longest = max(ids.shape[1], model.tokens(judged)[0].shape[1])
    coded = [{"input_ids": nn.functional.pad(ids, (0, longest - ids.shape[1])),
              "attention_mask": nn.functional.pad(mask, (0, longest - mask.shape[1]))}]  # fmt: skip
    started = time.monotonic()
    network = quantize_model(model.network, coded, outputs=["last_hidden_state"], progress=False, min_sqnr=None).to(device)
    seconds = time.monotonic() - started
    ids, mask = model.tokens(judged)
    exact = model.embed(ids, mask)
    hidden = network.dequantize(network(input_ids=ids.to(device), attention_mask=mask.to(device))).cpu()
    got = real_data.pooled(hidden, mask)
    near = probe.nearest(exact, min(_NEIGHBOURS, len(exact) - 1))
    cosines = nn.functional.cosine_similarity(exact.double(), got.double(), dim=1)
    return {
        "network": name,
        "samples": len(exact),
        "calibration_texts": len(calibration),
        "calibration_tokens": int(coded[0]["attention_mask"].sum()),
        "longest_text": longest,
        col.SQNR_DB: sqnr(exact, got),
        "cosine_mean": cosines.mean().item(),
        "cosine_min": cosines.min().item(),
        "nearest_kept": int((probe.nearest(got, 1)[:, 0] == near[:, 0]).sum()),
        "device": device.type,
        "conversion_s": round(seconds, 1),
    }
