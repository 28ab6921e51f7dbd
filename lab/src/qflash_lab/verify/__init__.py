"""Proof by disassembly (``qflash-lab verify``)."""
