"""The table of results: its columns and the names of methods, each spelt here and nowhere else.

A row is one method on one problem in one mode. Whatever a command or a script of ``benchmarks`` measures, its rows have these
columns; it writes those that apply (:func:`pick`), in this order. A name ends in its unit; counts and ratios have none.
``docs/benchmarking.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

COLUMNS: dict[str, str] = {}
"""Every column with what it holds, in the order of files. What does not apply to a row is None."""


def _column(name: str, text: str) -> str:
    COLUMNS[name] = text
    return name


# What was measured: the problem.
WORKLOAD = _column("workload", "attention: A1 to A7, the shape as text, or the name of a batch of sequences")
MODEL = _column("model", "a whole model's name")
LAYER = _column("layer", "a linear layer's name, or the number of an attention layer")
PART = _column("part", "of an ablation: kernel, scales, throughput, granularity or steps")
GROUP = _column("group", "rows of an ablation that are shown together")
LABEL = _column("label", "a row of an ablation, or a tuned shape, in words")
BATCH = _column("batch", "images a call")
SHAPE = _column("shape", "of the query: batch x heads x tokens x channels")
KEYS = _column("keys", "tokens of key and value")
TILES = _column("tiles", "tiles of keys")
AMPLITUDE = _column("amplitude", "factor of query and key")
LENGTHS = _column("lengths", "tokens of each packed sequence, as text")
HEADS = _column("heads", "heads of packed sequences")
HEAD_DIM = _column("head_dim", "channels a head of packed sequences")
ROWS = _column("rows", "rows of a linear layer's input")
INPUTS = _column("inputs", "channels that a linear layer takes")
OUTPUTS = _column("outputs", "channels that a linear layer returns")
EPILOGUE = _column("epilogue", "what follows a linear layer's product: int8, residual or gelu")
CAUSAL = _column("causal", "whether a causal mask is applied")
BIAS = _column("bias", "whether an additive bias is applied")
MASK = _column("mask", "an attention mask, in words")
INPUT = _column("input", "what tensors were drawn from")
DTYPE = _column("dtype", "of the inputs or, of a model, of weights and images")

# How: the method.
MODE = _column("mode", "kernel (int8 in, quantised beforehand), end-to-end (float in) or eager (no CUDA graph)")
RECIPE = _column("recipe", "QFlash's recipe")
SCALES = _column("scales", "where QFlash's scales come from: dynamic or static")
METHOD = _column("method", "what computed it")
TITLE = _column("title", "the method's name in text")
INTEGER_ONLY = _column("integer_only", "whether its softmax runs in integers")
RULE = _column("rule", "tiles of the rule")
BEST = _column("best", "tiles of the fastest candidate")

# Time.
IMAGES_PER_S = _column("images_per_s", "images a second")
MEDIAN_US = _column("median_us", "microseconds of a call, median of the samples")
Q1_US = _column("q1_us", "its lower quartile")
Q3_US = _column("q3_us", "its upper quartile")
MIN_US = _column("min_us", "its least sample")
MAX_US = _column("max_us", "its greatest sample")
SAMPLES = _column("samples", "how many samples")
CALLS = _column("calls", "calls in a sample; of energy, in all")
ISSUE_US = _column("issue_us", "eager: wall time until the last call has returned, a call")
CPU_US = _column("cpu_us", "the process's CPU time, a call")
DURATION_US = _column("duration_us", "Nsight Compute's durations of a call's kernels, added up")
BASE_US = _column("base_us", "the median of the other revision")
NEW_US = _column("new_us", "the median of this revision")
RULE_US = _column("rule_us", "the median with the rule's tiles")
BEST_US = _column("best_us", "the median with the best tiles")
EMPTY_S = _column("empty_s", "seconds of a first call with empty caches")
WARM_S = _column("warm_s", "seconds of a first call with filled caches")
TOPS = _column("tops", "10^12 operations a second")
GOPS = _column("gops", "10^9 integer operations a second")
OF_INT8_PEAK = _column("of_int8_peak", "share of the card's int8 operations a second")
OF_BANDWIDTH = _column("of_bandwidth", "share of the card's bytes a second")

# Energy.
UJ = _column("uj", "microjoules of a call, idle power included, median of the samples")
UJ_MIN = _column("uj_min", "the least sample")
UJ_MAX = _column("uj_max", "the greatest sample")
UJ_ABOVE_IDLE = _column("uj_above_idle", "without the power that the idle GPU takes")
MJ_PER_IMAGE = _column("mj_per_image", "millijoules an image, idle power included")
WATTS = _column("watts", "mean power")

# Nsight Compute's counters.
KERNELS = _column("kernels", "launches of a call")
IMMA_PERCENT = _column("imma_percent", "cycles in which the tensor pipe worked on int8 products")
HMMA_PERCENT = _column("hmma_percent", "cycles in which it worked on 16-bit products")
TENSOR_PERCENT = _column("tensor_percent", "cycles in which it worked")
ISSUE_PERCENT = _column("issue_percent", "issue slots that were used")
OCCUPANCY_PERCENT = _column("occupancy_percent", "warps that were resident")
REGISTERS = _column("registers", "registers a thread, the most of the kernels")
INSTRUCTIONS = _column("instructions", "warp instructions of the call")

# Comparisons.
BEST_SDPA = _column("best_sdpa", "the fastest of PyTorch's fused kernels in the same run")
RATIO = _column("ratio", "to what the command compares with; its record says how")
RATIO_Q1 = _column("ratio_q1", "lower quartile of the ratio")
RATIO_Q3 = _column("ratio_q3", "upper quartile of the ratio")
BIAS_COST = _column("bias_cost", "time with a bias over the time without")
SPEEDUP = _column("speedup", "the time of step V0 over the row's")
SAME_BITS = _column("same_bits", "whether both revisions returned the same")

# Accuracy.
SQNR_DB = _column("sqnr_db", "signal to quantisation noise, mean over the seeds")
SQNR_MIN_DB = _column("sqnr_min_db", "the least seed's")
SQNR_MAX_DB = _column("sqnr_max_db", "the greatest seed's")
BASE_SQNR_DB = _column("base_sqnr_db", "the other revision's")
NEW_SQNR_DB = _column("new_sqnr_db", "this revision's")
SQNR_OF = _column("sqnr_of", "what part of the output it is of")
WORST_HEAD_DB = _column("worst_head_db", "that of the worst head")
MSE = _column("mse", "mean squared error, mean over the seeds")
SEEDS = _column("seeds", "how many draws")
PAPER_SQNR_DB = _column("paper_sqnr_db", "the paper's figure")
PAPER_MSE = _column("paper_mse", "the paper's figure")

ERROR = _column("error", "why there are no figures")

# Methods, as tables and files call them.
SDPA = "sdpa"
SDPA_FLASH = "sdpa flash"
SDPA_CUDNN = "sdpa cudnn"
SDPA_EFFICIENT = "sdpa efficient"
FP16 = (SDPA_FLASH, SDPA_CUDNN, SDPA_EFFICIENT)
"""PyTorch's fused 16-bit kernels: a comparison with fp16 is with the fastest of them that a run has."""
QFLASH = "qflash"
QFLASH_INT8 = "qflash int8"
OURS = (QFLASH_INT8, QFLASH)
I_VIT, INT_FLASH_FULL, INT_FLASH_HALF, QATTN = (
    f"{name} kernel" for name in ("i-vit", "int-flash-full", "int-flash-half", "qattn")
)
FLOAT_SOFTMAX = (INT_FLASH_FULL, INT_FLASH_HALF, QATTN)
"""This library's kernels of methods with int8 products and a float softmax."""
BASELINES = (I_VIT, *FLOAT_SOFTMAX)
TIMM, COMPILE, COMPILE_SDPA, INTEGER = "timm", "compile", "compile sdpa", "integer"
KEPT_BIAS = f"{QFLASH} kept bias"
COMPILE_QFLASH, COMPILE_KEPT_BIAS = f"{COMPILE} {QFLASH}", f"{COMPILE} {KEPT_BIAS}"
FLASH_VARLEN = "flash varlen"
CUBLAS_FLOAT16, CUBLAS_FLOAT8, CUBLAS_INT8 = "cuBLAS float16", "cuBLAS float8", "cuBLAS int8 to int32"

PROBLEM = (WORKLOAD, BATCH, SHAPE, KEYS, CAUSAL, BIAS, INPUT, DTYPE)
"""The columns of an attention problem."""
TIMES = (MEDIAN_US, Q1_US, Q3_US, MIN_US, MAX_US, SAMPLES, CALLS)
"""The columns of a time."""


def pick(*names: str) -> tuple[str, ...]:
    """Return columns in the order of :data:`COLUMNS`.

    Raises:
        ValueError: a name is no column.
    """
    for name in names:
        if name not in COLUMNS:
            raise ValueError(f"column must be one of {tuple(COLUMNS)}, got {name!r}")
    return tuple(name for name in COLUMNS if name in names)


def empty(fields: Iterable[str], **known: Any) -> Row:
    """Return a row of these columns, None but for what is known."""
    row: Row = dict.fromkeys(fields)
    return row | known


def problem_label(row: Row) -> str:
    """Return what a row's problem is called in tables, without the batch."""
    name = next((str(row[column]) for column in (WORKLOAD, MODEL, LAYER, LABEL) if row.get(column) is not None), "")
    return name + " causal" * bool(row.get(CAUSAL)) + " bias" * bool(row.get(BIAS))


def full_label(row: Row) -> str:
    """Return what a row's problem is called where it stands alone: with the batch."""
    return problem_label(row) + (f" b{row[BATCH]}" if row.get(BATCH) else "")
