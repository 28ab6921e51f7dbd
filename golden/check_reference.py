#!/usr/bin/env python3
"""Compare ``reference.c`` with golden vectors: ``python golden/check_reference.py FILE...``.

Compiles the golden model in C with ``$CC`` (default ``cc``) and ``$CFLAGS``, and puts its functions in the place of the
checker's own, which then computes every case that the model has an operator for. It needs numpy and safetensors.
Operations on floats alone are no part of the model: their cases are left out and counted.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import numpy as np
from safetensors import SafetensorError

import checker

HERE = pathlib.Path(__file__).resolve().parent
FLAGS = ("-std=c99", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-pedantic", "-Werror")
ACTIVATIONS = {"gelu": 0, "silu": 1, "relu": 2}
LEFT_OUT = ("quantize", "quantize_with_scale", "quantize_bias", "multiply_add")
"""Operations on floats. Of attention on floats the checker prepares what the model then takes in int8."""


class BoundError(ValueError):
    """A quantity left the bound that the documents state; the message names it."""


class Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "multiplier")] + [
        (name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "left", "x_bits")
    ]


class Attention(ctypes.Structure):
    POINTERS = (
        "query", "key", "value", "query_scale", "key_scale", "value_scale", "output_scale", "offset", "mask", "bias", "ids",
        "out", "float_out",
    )  # fmt: skip
    INTEGERS = (
        "batch", "heads", "key_heads", "queries", "keys", "head_dim", "value_dim", "constant_mantissa", "constant_exponent",
        "causal", "key_token", "quadratic", "probability_bits", "nearest", "exact", "online", "key_block", "floor_output",
    )  # fmt: skip
    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [(name, ctypes.c_int64) for name in INTEGERS]


def compile_model(folder, flags=()):
    """Compile the model to a library; return its path."""
    library = pathlib.Path(folder) / "reference.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    given = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *FLAGS, *given, *flags, "-shared", "-fPIC", str(HERE / "reference.c"), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    return library


class Model:
    """The functions of ``reference.h`` on NumPy arrays. Those with names of the checker's take what these take."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))

    def call(self, name, *arguments):
        """Call a function; arrays are passed by address.

        Raises:
            BoundError: it says that a bound did not hold.
        """
        function = getattr(self.library, f"reference_{name}")
        function.restype = ctypes.c_char_p
        given = []
        for each in arguments:
            if isinstance(each, np.ndarray):
                assert each.flags.c_contiguous and each.itemsize == 4
                given.append(ctypes.c_void_p(each.ctypes.data))
            elif isinstance(each, ctypes.Structure):
                given.append(ctypes.byref(each))
            else:
                given.append(each if each is None or isinstance(each, ctypes._SimpleCData) else ctypes.c_int64(int(each)))
        broken = function(*given)
        if broken is not None:
            raise BoundError(f"{name}: {broken.decode()} is out of bounds")

    # Linear layers and activations

    def layer(self, x, W, b, R, left):
        rows = whole(x).reshape(-1, len(W))
        bits = 8 if rows.size == 0 or (rows.min() >= -128 and rows.max() <= 127) else 16
        arrays = rows, whole(W.T), whole(b), whole(R)
        sizes = len(rows), len(W), W.shape[1], left, bits
        return arrays, Layer(*(array.ctypes.data for array in arrays), *sizes)

    def linear(self, x, W, b, R, left, bits=None, residual=None):
        _keep, layer = self.layer(x, W, b, R, left)
        out = np.empty((*x.shape[:-1], W.shape[1]), np.int32)
        more = None if residual is None else whole(np.broadcast_to(residual, out.shape))
        self.call("linear", layer, more, ctypes.c_int(bits), out)
        return out.astype(np.int64)

    def activated(self, name, x, W, b, R, left, M, B, n):
        _keep, layer = self.layer(x, W, b, R, left)
        out = np.empty((*x.shape[:-1], W.shape[1]), np.int32)
        self.call("activated", layer, ctypes.c_int(ACTIVATIONS[name]), whole(M), whole(B), n, out)
        return out.astype(np.int64)

    def gated(self, x, A, R, B, name, bits):
        x = whole(x)
        channels = x.shape[-1] // 2
        out = np.empty((*x.shape[:-1], channels), np.int32)
        rows = x.size // x.shape[-1]
        kind, bits = ctypes.c_int(ACTIVATIONS[name]), ctypes.c_int(bits)
        self.call("gated", x, rows, channels, A, kind, whole(R), whole(B), bits, out)
        return out.astype(np.int64)

    # Normalisation

    def normalise(self, h, E, centred=True):
        h, channels = whole(h), h.shape[-1]
        out = np.empty_like(h)
        self.call("normalise", h, h.size // channels, channels, E, ctypes.c_int(centred), out)
        return out.astype(np.int64)

    def layer_norm(self, h, E, G, B, n, bits, centred=True, residual=None):
        h, channels = whole(h), h.shape[-1]
        out, more = np.empty_like(h), None if residual is None else whole(residual)
        sizes = h.size // channels, channels, E
        self.call("layer_norm", h, *sizes, whole(G), whole(B), n, ctypes.c_int(centred), more, ctypes.c_int(bits), out)
        return out.astype(np.int64)

    def row_constants(self, C):
        found = np.empty(4, np.int32)
        self.call("row_constants", C, found)
        return tuple(found.tolist())

    def inverse_root(self, v):
        v = whole(v)
        out = np.empty_like(v)
        self.call("inverse_root", v, v.size, out)
        return out.astype(np.int64)

    # Other layers, and data movement

    def narrow(self, h, b, R, left, bits):
        h, channels = whole(h), h.shape[-1]
        out = np.empty_like(h)
        self.call("narrow", h, h.size // channels, channels, whole(b), whole(R), left, ctypes.c_int(bits), out)
        return out.astype(np.int64)

    def mean(self, h, b, R, left, bits):
        h = whole(h)
        out = np.empty((h.shape[0], h.shape[2]), np.int32)
        self.call("mean", h, *h.shape, whole(b), whole(R), left, ctypes.c_int(bits), out)
        return out.astype(np.int64)

    def rotary(self, x, turns, b, R):
        x, turns = whole(x), whole(turns)
        out = np.empty_like(x)
        self.call("rotary", x, *x.shape, turns, turns.shape[0], turns.shape[2], whole(b), whole(R), out)
        return out.astype(np.int64)

    def embed(self, ids, table, positions, padded):
        ids, table = whole(ids), whole(table)
        out = np.empty((*ids.shape, table.shape[1]), np.int32)
        more = None if positions is None else whole(positions)
        self.call("embed", ids, *ids.shape, table, *table.shape, more, ctypes.c_int(padded), out)
        return out.astype(np.int64)

    def select_token(self, h, ids, token):
        h, ids = whole(h), whole(ids)
        out = np.empty((len(h), h.shape[2]), np.int32)
        self.call("select_token", h, ids, *h.shape, -1 if token is None else token, out)
        return out.astype(np.int64)

    def cut_patches(self, images, size):
        images = whole(images)
        batch, channels, height, width = images.shape
        patches = (height // size[0]) * (width // size[1])
        out = np.empty((batch, patches, channels * math.prod(size)), np.int32)
        self.call("patches", images, *images.shape, *size, out)
        return out.astype(np.int64)

    def to_windows(self, x, grid, window, roll):
        x, tokens = whole(x), math.prod(window)
        out = np.empty((x.size // x.shape[-1] // tokens, tokens, x.shape[-1]), np.int32)
        self.call("windows", x, len(x), *grid, x.shape[-1], *window, *roll, ctypes.c_int(0), out)
        return out.astype(np.int64)

    def from_windows(self, x, grid, window, roll):
        x, tokens = whole(x), math.prod(grid)
        out = np.empty((x.size // x.shape[-1] // tokens, tokens, x.shape[-1]), np.int32)
        self.call("windows", x, len(out), *grid, x.shape[-1], *window, *roll, ctypes.c_int(1), out)
        return out.astype(np.int64)

    def join_patches(self, h, grid):
        h = whole(h)
        out = np.empty((len(h), h.shape[1] // 4, 4 * h.shape[2]), np.int32)
        self.call("join_patches", h, len(h), *grid, h.shape[2], out)
        return out.astype(np.int64)

    # Attention and its steps

    def attention(
        self, query, key, value, query_scale, key_scale, value_scale, recipe, softmax_scale,
        offset=None, mask=None, bias=None, causal=False, output_scale=None, floats=False, ids=None,
    ):  # fmt: skip
        batch, heads, queries, head_dim = query.shape
        key_heads, keys, value_dim = *key.shape[1:3], value.shape[3]
        scores, channels = (batch, heads, queries, keys), (batch, key_heads, 1, value_dim)
        per_token = key_scale.shape[2] > 1
        shapes = {
            "query": query.shape, "key": key.shape, "value": value.shape, "query_scale": (batch, heads, queries, 1),
            "key_scale": (batch, key_heads, keys if per_token else 1, 1), "value_scale": channels, "offset": channels,
            "output_scale": (batch, heads, 1, value_dim), "mask": scores, "bias": scores,
            "ids": (batch, keys),
        }  # fmt: skip
        given = {
            "query": query, "key": key, "value": value, "query_scale": query_scale, "key_scale": key_scale,
            "value_scale": value_scale, "offset": offset, "output_scale": output_scale, "mask": mask, "bias": bias,
            "ids": ids,
        }  # fmt: skip
        arrays = {
            name: (bits if name in ("offset",) or name.endswith("scale") else whole)(np.broadcast_to(x, shapes[name]))
            for name, x in given.items()
            if x is not None
        }
        out = np.empty((batch, heads, queries, value_dim), np.float32 if floats else np.int32)
        arrays["float_out" if floats else "out"] = out
        mantissa, exponent = softmax_constant(softmax_scale)
        numbers = {
            "batch": batch, "heads": heads, "key_heads": key_heads, "queries": queries, "keys": keys, "head_dim": head_dim,
            "value_dim": value_dim, "constant_mantissa": mantissa, "constant_exponent": exponent, "causal": causal,
            "key_token": per_token, "quadratic": recipe["exponential"] == "quadratic",
            "probability_bits": recipe["probability_bits"], "nearest": recipe["probability_rounding"] == "nearest",
            "exact": recipe["row_sum"] == "exact", "online": recipe["normalization"] == "online",
            "key_block": recipe["key_block"], "floor_output": recipe["output"] == "value_scale",
        }  # fmt: skip
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        self.call("attention", Attention(**pointers, **{name: int(x) for name, x in numbers.items()}))
        return out if floats else out.astype(np.int64)

    def score_multiplier(self, p, x):
        scales = [bits(each) for each in np.broadcast_arrays(x["query_scale"], x["key_scale"])]
        out = np.empty((*scales[0].shape, 6), np.int32)
        self.call("score_multiplier", *scales, scales[0].size, *softmax_constant(p["scale"]), p["head_dim"], out)
        return {name: out[..., i] for i, name in enumerate(("R", "E", "M", "F", "M_biased", "F_biased"))}

    def column_multiplier(self, p, x):
        query, key = bits(x["query_scale"]), bits(x["key_scale"])
        found = {"A": np.empty(key.shape, np.int32), "R": np.empty(query.shape, np.int32), "F": np.empty(query.shape, np.int32)}
        for place in np.ndindex(*key.shape[:2]):
            A, both = np.empty(key.shape[2], np.int32), np.empty(2, np.int32)
            numbers = *softmax_constant(p["scale"]), p["head_dim"]
            column = np.ascontiguousarray(key[place].ravel())
            self.call("column_multiplier", ctypes.c_uint32(int(query[place].item())), column, len(A), *numbers, A, both)
            found["A"][place], found["R"][place], found["F"][place] = A[:, None], both[0], both[1]
        return found

    def exponential(self, p, x):
        t, F = whole(x["t"]), whole(x["F"])
        kind, width = ctypes.c_int(p["exponential"] == "quadratic"), ctypes.c_int(p["bits"])
        out, w, release = {}, np.empty_like(t), np.empty_like(t)
        for rounding in ("nearest", "floor"):
            out[rounding] = np.empty_like(t)
            self.call("exponential", t, F, t.size, kind, width, ctypes.c_int(rounding == "nearest"), out[rounding], w, release)
        exact = {"w": w} if p["bits"] == 8 else {}
        return out | exact | ({"release": release} if p["exponential"] == "linear" else {})

    def reciprocal(self, D):
        D = whole(D)
        out = np.empty_like(D)
        self.call("reciprocal", D, D.size, out)
        return out

    def output_ratio(self, p, x):
        value, output = bits(x["value_scale"]), bits(x["output_scale"])
        out = np.empty((*value.shape, 2), np.int32)
        self.call("output_ratio", value, output, value.size, out)
        return {"R": out[..., 0], "shift": out[..., 1]}


def whole(x):
    """Integers as a contiguous array of int32, which must hold them."""
    out = np.ascontiguousarray(x, np.int32)
    assert (out == x).all()
    return out


def bits(scale):
    """The bits of float32."""
    return np.ascontiguousarray(scale, np.float32).view(np.uint32)


def softmax_constant(scale):
    """m_C and e_C of ``scale·log2(e)``: what a host gives the integer machine."""
    fraction, exponent = math.frexp(scale * math.log2(math.e))
    mantissa = round(fraction * 2**24)
    return (2**23, exponent - 23) if mantissa == 2**24 else (mantissa, exponent - 24)


def put_in_place(model):
    """Have the checker's operations computed by the model."""
    names = (
        "linear", "gated", "normalise", "layer_norm", "row_constants", "inverse_root", "narrow", "mean", "cut_patches",
        "to_windows", "from_windows", "join_patches", "attention", "reciprocal", "embed", "select_token",
    )  # fmt: skip
    for name in names:
        setattr(checker, name, getattr(model, name))

    def run_with_activation(by, p, x):
        constants = x[f"{by}_multiplier"], x[f"{by}_offset"], p[f"{by}_shift"]
        return {"output": model.activated(by, x["x"], *checker.layer(x), p["left"], *constants)}

    def with_activation(self, name, x, by):
        constants = self.get(name, f"{by}_multiplier"), self.get(name, f"{by}_offset")
        return model.activated(by, x, *self.layer(name), *constants, self.parameters["constants"][name][f"{by}_shift"])

    def rotary(self, name, sizes, x):
        x = x.reshape(*x.shape[:2], sizes["channels"])
        return model.rotary(x, self.get(name, "turns"), self.get(name, "offset"), self.get(name, "multiplier"))

    checker.run_with_activation, checker.Network.with_activation = run_with_activation, with_activation
    checker.NODES |= {"Rotary": rotary}
    checker.OPERATIONS |= {
        "inverse_root": lambda p, x: {"x": model.inverse_root(x["v"])},
        "reciprocal": lambda p, x: {"x": model.reciprocal(x["D"])},
        "rotary": lambda p, x: {"output": model.rotary(x["x"], x["turns"], x["offset"], x["multiplier"])},
        "score_multiplier": model.score_multiplier,
        "column_multiplier": model.column_multiplier,
        "exponential": model.exponential,
        "output_ratio": model.output_ratio,
    }


def check(path, report=print):
    """Check one file; returns the numbers of cases, of those that differ, and of those left out."""
    cases = wrong = left_out = 0
    for name, operation, parameters, inputs, outputs in checker.read(path):
        if operation in LEFT_OUT:
            left_out += 1
            continue
        cases += 1
        try:
            difference = checker.compare(outputs, checker.OPERATIONS[operation](parameters, inputs))
        except BoundError as error:
            difference = str(error)
        wrong += bool(difference)
        if difference:
            report(f"MISMATCH {path}: {name} ({operation}): {difference}")
    return cases, wrong, left_out


def main():
    parser = argparse.ArgumentParser(description="Check the golden model in C against golden vectors of QFlash.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="safetensors files of golden vectors")
    files = parser.parse_args().files
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        put_in_place(Model(compile_model(folder)))
        for path in files:
            try:
                cases, wrong, left_out = check(path)
            except (OSError, ValueError, SafetensorError) as error:
                print(f"ERROR {path}: {error}")
                failed = True
                continue
            print(f"{path}: {cases} cases, {wrong} mismatches; {left_out} of floats left out")
            failed |= wrong > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
