"""Time integer networks of text encoders beside ``torch.compile``, in float16 and bfloat16.

Models have published configurations (``configurations`` beside this script), random weights, and texts without padding.

    python benchmarks/text_networks.py [--model all-minilm-l6-v2] [--batch 1] [--dtype float16] [--name networks_texts_h200]

writes results/NAME.json beside this script, keeping the rows that were not measured, and the table of docs/integer_network.md,
which shows the default's; with --tables only that. A row's ``dtype`` is that of the compiled model beside it. Needs
transformers.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import declared
import qflash
import single_records
from qflash_lab.bench import console, records, runner
from qflash_lab.bench import schema as col
from qflash_lab.bench.metrics import sqnr

CONFIGURATIONS = Path(__file__).resolve().parent / "configurations"
MODELS = ("all-minilm-l6-v2", "clip-vit-base-patch32", "clip-vit-large-patch14")
BATCHES, DTYPES = (1, 8, 64), ("float16", "bfloat16")
MINILM_TOKENS = 128
CALIBRATION_TEXTS = 32
FIELDS = (
    *col.pick(col.MODEL, col.BATCH, col.DTYPE, col.METHOD, col.MEDIAN_US, col.Q1_US, col.Q3_US, col.SAMPLES, col.RATIO),
    *col.pick(col.SQNR_DB, col.ERROR),
)


def load(name: str) -> tuple[nn.Module, str, int]:
    """Return an encoder with random weights, float32 and in evaluation mode, its output that is timed, and its tokens."""
    import transformers

    kept = json.loads((CONFIGURATIONS / f"{name}.json").read_text(encoding="utf-8"))["config"]
    config = transformers.AutoConfig.for_model(**kept)
    torch.manual_seed(0)
    if hasattr(config, "text_config"):
        tower = transformers.CLIPTextModelWithProjection(config.text_config)
        return tower.eval(), "text_embeds", config.text_config.max_position_embeddings
    return transformers.AutoModel.from_config(config).eval(), "last_hidden_state", MINILM_TOKENS


def draw_texts(config: Any, count: int, tokens: int, seed: int) -> torch.Tensor:
    """Draw ids (count, tokens), the end of a text last; the largest ids are a tokeniser's own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size - 2, (count, tokens), generator=generator)
    if config.eos_token_id is not None:
        ids[:, -1] = config.eos_token_id
    return ids


def measure(name: str, batches: list[int], dtypes: list[str], device: torch.device, rounds: int) -> list[col.Row]:
    """Return the rows of an encoder: compiled and in integers, by turns, for each batch and type."""
    model, output, tokens = load(name)
    config: Any = model.config
    model.to(device)
    calibration = draw_texts(config, CALIBRATION_TEXTS, tokens, 1).to(device)
    network = qflash.quantize_model(model, [calibration], outputs=[output], progress=False)
    rows: list[col.Row] = []
    for dtype in dtypes:
        for batch in batches:
            ids = draw_texts(config, batch, tokens, 0).to(device)
            wanted = model(ids)[output]

            def compiled(dtype: str = dtype, ids: torch.Tensor = ids, wanted: torch.Tensor = wanted) -> Any:
                call = torch.compile(copy.deepcopy(model).to(getattr(torch, dtype)))
                return functools.partial(call, ids), {col.SQNR_DB: round(sqnr(wanted, call(ids)[output]), 2)}

            def integer(ids: torch.Tensor = ids, wanted: torch.Tensor = wanted) -> Any:
                def call() -> torch.Tensor:
                    return network.dequantize(network(ids))

                return call, {col.SQNR_DB: round(sqnr(wanted, call()), 2)}

            def row(method: str, dtype: str = dtype, batch: int = batch) -> col.Row:
                return col.empty(FIELDS, model=name, batch=batch, dtype=dtype, method=method) | {"tokens": tokens}

            found = runner.measure(
                [runner.Run(row(col.COMPILE), compiled), runner.Run(row(col.INTEGER), integer)], device, rounds
            )
            # what was compiled for one batch is not to be made general for the next
            torch.compiler.reset()
            runner.compare(found, lambda row: row[col.METHOD] == col.COMPILE)
            rows += found
    return rows


def main() -> None:
    """Measure, and write results and the table."""
    parser = declared.parser(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable; all if left out")
    parser.add_argument("--batch", action="append", type=int, help="repeatable; 1, 8 and 64 if left out")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the compiled model; both if left out")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    parser.add_argument("--name", default=single_records.TEXTS, help="of the result file")
    given = parser.parse_args()
    if not given.tables:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        path = declared.RESULTS / f"{given.name}.json"
        for name in given.model or MODELS:
            with torch.inference_mode():
                rows = measure(name, given.batch or list(BATCHES), given.dtype or list(DTYPES), device, given.rounds)
            head = {
                "what": "text encoders in integers and in floating point", "environment": records.environment(device),
                "timing": "CUDA graphs of whole forward passes, warm, by turns, median; ratio: compiled / integer",
            }  # fmt: skip
            declared.keep(path, rows, col.MODEL, col.BATCH, col.DTYPE, col.METHOD, order=place, **head)
            console.table_console().print(rows)
    single_records.PARTS.write()


def place(row: col.Row) -> tuple[int, int, int]:
    """Return where a row stands among others."""
    return MODELS.index(row[col.MODEL]), DTYPES.index(row[col.DTYPE]), row[col.BATCH]


if __name__ == "__main__":
    main()
