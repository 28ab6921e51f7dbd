"""Kernels in Gluon. Nothing here is imported before one runs: the interpreter has no Gluon."""
