"""What measures QFlash: benchmarks, evaluation, baselines, proof by disassembly, and the paper's reproduction."""
