"""What the paper prints: its tables and claims, for comparison (RTX 5090, TVM 0.8, PyTorch 2.7.1, Triton 3.3.1).

The table of SQNR and MSE is :data:`qflash_lab.paper.paper_results.TABLE4`.
"""

from __future__ import annotations

from ..bench import schema as col

QFLASH_READINGS = ("qflash-printed", "qflash-authors", "qflash-paper")
"""Methods that read the paper's own row: its equations to the letter, its authors' code, and this library's preset."""

TABLE4 = {
    ("A2", "i-vit"): (25.80, 7.05e-3),
    ("A2", "qattn"): (34.12, 1.04e-3),
    ("A2", "int-flash-half"): (38.19, 4.04e-4),
    ("A2", "int-flash-full"): (36.92, 5.41e-4),
    ("A7", "i-vit"): (25.22, 9.38e-3),
    ("A7", "qattn"): (34.75, 1.04e-3),
    ("A7", "int-flash-half"): (39.07, 3.86e-4),
    ("A7", "int-flash-full"): (37.80, 5.17e-4),
    **{("A2", reading): (32.50, 1.51e-3) for reading in QFLASH_READINGS},
    **{("A7", reading): (31.02, 2.47e-3) for reading in QFLASH_READINGS},
}
"""The paper's SQNR (dB) and MSE by workload and method, batch 8, from its table of SQNR and MSE (label ``table:1``)."""

DEVICE = "NVIDIA GeForce RTX 5090"

SPEEDUP_OVER_I_VIT = {("ViT/DeiT", 1): 4.54, ("ViT/DeiT", 8): 6.73, ("Swin", 1): 7.69, ("Swin", 8): 8.69}
"""Largest speedup over I-ViT by family of workloads (A1-A3, A4-A7) and batch (abstract, section 5.1, Figure 3)."""

FAMILIES = {"ViT/DeiT": ("A1", "A2", "A3"), "Swin": ("A4", "A5", "A6", "A7")}

MIXED = ("INT-Flash-Half", "INT-Flash-Full", "QAttn")
"""Kernels that the paper calls mixed-precision."""

UTILISATION: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "Flash-2": {"A2": (None, 13.08), "A7": (None, 4.69)},
    "QAttn": {"A2": (3.75, 7.51), "A7": (1.25, 2.51)},
    "INT-Flash-Half": {"A2": (3.38, 6.75), "A7": (1.12, 2.25)},
    "INT-Flash-Full": {"A2": (7.18, None), "A7": (2.13, None)},
    "QFlash": {"A2": (8.00, None), "A7": (2.55, None)},
}
"""Table 2: (IMMA, HMMA) percent of the peak, batch 8."""

ENERGY_UJ = {"Flash-2": 929.6, "INT-Flash-Full": 840.0, "INT-Flash-Half": 920.5, "QAttn": 795.2, "QFlash": 754.6}
"""Table 3: microjoules, A2, batch 8."""

MODELS = {
    "ViT-S": 81.38, "ViT-B": 85.10, "DeiT-T": 72.21, "DeiT-S": 79.85, "DeiT-B": 81.85, "Swin-T": 81.35, "Swin-S": 83.20,
}  # fmt: skip
"""Table 5: Top-1 in percent of FP32."""

TOP1 = {
    "QFlash": (82.24, 86.84, 71.70, 79.46, 81.59, 80.06, 81.86),
    "I-ViT": (81.19, 85.02, 71.70, 79.53, 81.47, 80.83, 82.81),
    "I-BERT": (81.00, 83.97, 71.20, 79.48, 81.59, 81.11, 83.09),
    "FQ-ViT": (81.06, 84.82, 71.53, 79.39, 81.72, 80.90, 83.15),
    "INT-Flash-Full": (80.60, 84.74, 71.64, 79.64, 81.85, 80.04, 82.11),
    "INT-Flash-Half": (80.62, 84.83, 71.64, 79.68, 81.90, 80.05, 83.20),
    "QAttn": (80.23, 84.68, 71.25, 79.43, 81.85, 80.13, 82.24),
}
"""Table 5: Top-1 in percent, in the order of :data:`MODELS`."""

STEP_SPEEDUP_PERCENT = {"V1": 41.4, "V2": 46.0, "V3": 61.0, "V4": 62.4}
"""Figure 4 (appendix A): speedup over V0, A2, batch 1024."""

METHODS = {
    "Flash-2": (col.SDPA_FLASH, "fp16-flash"),
    "I-ViT": (col.I_VIT, "i-vit"),
    "I-BERT": ("i-bert",),
    "FQ-ViT": ("fq-vit",),
    "INT-Flash-Full": (col.INT_FLASH_FULL, "int-flash-full"),
    "INT-Flash-Half": (col.INT_FLASH_HALF, "int-flash-half"),
    "QAttn": (col.QATTN, "qattn"),
    "QFlash": (col.QFLASH_INT8, "qflash-paper"),
}
"""The names that results give the paper's methods, as commands write them; the first that is there counts."""
