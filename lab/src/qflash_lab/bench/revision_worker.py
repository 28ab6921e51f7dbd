"""Times one revision of QFlash; :mod:`qflash_lab.bench.revisions` runs this file in one process per revision.

It imports the ``qflash`` that comes first on the path and uses nothing of it but public names and, where there is one, its list
of lengths, so that it runs with revisions whose modules lie elsewhere. The clocks are those of :mod:`qflash_lab.bench.timers`,
loaded from the file beside this one: both revisions are timed by the same code on the same inputs.

Orders come as JSON on standard input, one a line; each is answered by a line of JSON to the file descriptor in the argument.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

import qflash


def load_neighbour(name: str) -> Any:
    """Import a file beside this one, which may import nothing of QFlash."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"qflash_revision_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


errors, timers = load_neighbour("errors"), load_neighbour("timers")


def read_recipe(order: dict[str, Any]) -> Any:
    """Return the recipe of an order: a preset's name, or this revision's preset with changes."""
    if not order["changes"]:
        return order["recipe"]
    return getattr(qflash, order["recipe"].upper()).replace(**order["changes"])


def prepare_attention(order: dict[str, Any], given: dict[str, Any], device: torch.device) -> Callable[[], Any]:
    """Return the call to time: int8 to int8 on tensors quantised beforehand, or float to float."""
    query, key, value, bias = (given[name] for name in ("query", "key", "value", "bias"))
    if bias is not None:
        bias = qflash.align_bias(bias)
    options: dict[str, Any] = {"is_causal": order["causal"], "recipe": read_recipe(order)}
    if order["mode"] != "kernel":
        return lambda: qflash.attention(query, key, value, bias, **options)
    tensors = qflash.quantize(query), qflash.quantize(key), qflash.quantize(value)
    if bias is not None:
        bias = qflash.align_bias(qflash.quantize_bias(bias))
    fitted = qflash.int8_attention(*tensors, bias, **options, out_dtype=torch.float32)
    assert isinstance(fitted, torch.Tensor)
    scale = fitted.abs().amax() / 127
    return lambda: qflash.int8_attention(*tensors, bias, **options, output_scale=scale)


def prepare_model(order: dict[str, Any], given: dict[str, Any], device: torch.device) -> Callable[[], Any]:
    """Return the call to time: a forward pass of a model that computes its attention with this revision."""
    dtype = getattr(torch, order["dtype"])
    model, images = given["model"].to(device, dtype), given["images"].to(dtype)
    keep_bias: dict[str, Any] = {"keep_bias": True} if order["keep_bias"] else {}
    qflash.patch(model, recipe=read_recipe(order), **keep_bias)
    return lambda: model(images)


class Server:
    """Answers orders: ``about``, ``prepare``, ``sample`` and ``forget``."""

    def __init__(self) -> None:
        self._timer: Any = None
        self._call: Callable[[], Any] | None = None
        self._figure = "us"
        self._device = torch.device("cpu")

    def about(self, order: dict[str, Any]) -> dict[str, Any]:
        """Say which package this is; from now on use so many threads."""
        torch.set_num_threads(order["threads"])
        return {"package": qflash.__path__[0]}

    def prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the call to time, write what it returns to a file, and warm up."""
        self.forget(order)
        self._device = device = torch.device(order["device"])
        with contextlib.suppress(ImportError):  # earlier revisions compile for more lengths by themselves
            importlib.import_module("qflash.kernels.lengths").expect_all()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        given = torch.load(order["inputs"], map_location=device, weights_only=False)
        call = (prepare_model if order["what"] == "model" else prepare_attention)(order, given, device)
        out = call()
        out = out if isinstance(out, torch.Tensor) else out.dequantize()
        torch.save(out.cpu(), order["output"])
        del out
        self._timer = timers.make_timer(call, order["mode"], device)
        self._call = call
        # what calls without a graph cost on a GPU is the host's time
        self._figure = "issue_us" if device.type == "cuda" and order["mode"] == "eager" else "us"
        return {"calls": self._timer.calls}

    def sample(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the microseconds of one call; one before it is not timed, for the other process has used the caches."""
        assert self._call is not None
        self._call()
        return {"us": self._timer.sample()[self._figure]}

    def forget(self, order: dict[str, Any]) -> dict[str, Any]:
        """Free what was prepared."""
        self._timer = self._call = None
        timers.tidy(self._device)
        return {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order says; what goes wrong is the answer too."""
        try:
            with torch.inference_mode():
                known = {"about": self.about, "prepare": self.prepare, "sample": self.sample, "forget": self.forget}
                return known[order["do"]](order)
        except Exception as error:
            return {"error": errors.describe(error)}


def serve() -> None:
    """Answer orders until there are no more."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    server = Server()
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
