"""Proof by disassembly (``qflash verify``)."""
