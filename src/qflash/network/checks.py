"""What conversion is checked against: the operations that were captured, and the integer network that came of it.


:func:`check_captured` compares what was captured of a model with the model itself, :func:`judge` the integer network with
the float one. Neither knows a model family.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..specification import layers as op
from ..specification.texts import PADDING, is_token
from .calibration import Calibration
from .capture.captured import Captured
from .compare import node_errors
from .graph import IntegerNetwork
from .outputs import Selected
from .patterns import Lowering
from .quality import Quality, of_tokens, sqnr_db

LEAST_READ_DB = 60.0
"""The float network as it was read equals the model from here on. Two float32 programs of one network have 90 to 130 dB."""
WARN_DB = 20.0
"""Below it an integer network comes with a warning."""
_BATCH = 4


class _Precision:
    """How PyTorch multiplies in float32: settings that all threads share. The last user puts back what the first one found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before: list[tuple[Any, str, Any]] = []

    def make_exact(self) -> None:
        """Allow no TF32 and no bfloat16 for one more user."""
        backends: Any = torch.backends
        if hasattr(backends, "fp32_precision"):
            # PyTorch 2.9 and newer; the functions for all products raise where somebody has set one of these
            places = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
            settings: list[tuple[Any, str, Any]] = [(place, "fp32_precision", "ieee") for place in places]
        else:
            settings = [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
        with self.lock:
            if self.users == 0:
                self.before = [(place, name, getattr(place, name)) for place, name, _ in settings]
                for setting in settings:
                    setattr(*setting)
            self.users += 1

    def restore(self) -> None:
        """Put the settings back when the last user is gone."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for setting in self.before:
                    setattr(*setting)


_precision = _Precision()


@contextlib.contextmanager
def exact_floats() -> Iterator[None]:
    """Compute float32 as such: no TF32, no bfloat16 in its place, no autocast."""
    _precision.make_exact()
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        _precision.restore()


def is_constant(rows: torch.Tensor) -> bool:
    """Tell whether all rows are equal, and more than one."""
    return len(rows) > 1 and bool((rows == rows[:1]).all())


def _tells_apart(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Tell whether rows differ by more than their error."""
    mean = want.mean(dim=0)
    return len(want) == 1 or sqnr_db(want - mean, got - mean) > 0


def in_float32(model: nn.Module) -> nn.Module:
    """Return the model, or a copy in float32 where it has parameters of 16 bits."""
    narrow = (torch.float16, torch.bfloat16)
    return copy.deepcopy(model).float() if any(x.dtype in narrow for x in model.parameters()) else model


def check_captured(captured: Captured, model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Require the captured operations to compute what the model does; return the model's outputs by name.

    How close they are is :attr:`.Captured.read_db`. A model of 16 bits is compared as a copy in float32, whose rounding hides
    nothing.

    Args:
        captured: of the model.
        model: the float one.
        images: normalised, float32 or float64.

    Raises:
        ValueError: an output has another shape or less than 60 dB; the message names the first operation that differs. Or the
            model's holds NaN or infinity.
    """
    exact = in_float32(model)
    selected = captured.select(exact)
    with exact_floats():
        try:
            returned = [captured.pick(selected(part)) for part in images.split(_BATCH)]
        except RuntimeError as error:
            if exact is model:
                raise
            raise ValueError(f"model cannot be compared in float32, quantise model.float(): {error}") from error
        wanted = {name: torch.cat([each[name] for each in returned]) for name in returned[0]}
        made = [captured(part) for part in images.split(_BATCH)]
        for name, want in wanted.items():
            got = torch.cat([each[name] for each in made])
            if not bool(want.isfinite().all()):
                raise ValueError("NaN or infinity in the output of the float network on the calibration images")
            if want.shape != got.shape:
                found = f"shape {tuple(want.shape)} and not {tuple(got.shape)}"
            elif (db := sqnr_db(of_tokens(want, images), of_tokens(got, images))) >= LEAST_READ_DB:
                captured.read_db = min(captured.read_db, db)
                continue
            else:
                found = f"{db:.1f} dB, where equal ones have {LEAST_READ_DB:.0f}"
            raise ValueError(
                f"model computes something that conversion does not know: its output {name!r} has {found} beside the "
                f"operations that were captured. {_first_difference(captured, images[:2])}"
            )
        if isinstance(selected, Selected) and selected.padded:
            _check_padding(captured, selected, images[:_BATCH])
    return wanted


def _check_padding(captured: Captured, selected: Selected, ids: torch.Tensor) -> None:
    """Require outputs of a model of texts that do not depend on ids at places without a token, which the network has not.

    Args:
        captured: of the model.
        selected: the model.
        ids: some; here the second half of each text has no token.

    Raises:
        ValueError: an output does.
    """
    tables = [x.weight for x in captured.operations if x.kind == "embedding" and x.weight is not None]
    known = {0, captured.filler, *(x.token for x in captured.operations if x.kind == "select")}
    other = next((x for x in range(min(map(len, tables), default=0)) if x not in known), 0)
    ids = ids.clone()
    ids[:, (ids.shape[1] + 1) // 2 :] = PADDING
    found = []
    for selected.filler in (0, other):
        found.append({name: of_tokens(x, ids) for name, x in captured.pick(selected(ids)).items()})
    selected.filler = 0
    for name, want in found[0].items():
        if not (db := sqnr_db(want, found[1][name])) >= LEAST_READ_DB:
            raise ValueError(
                f"model computes its output {name!r} of places without a token, too, as a mean over all places or the last one "
                f"does: with other ids there it has {db:.1f} dB. Without attention_mask a network takes all places as tokens"
            )


def check_rotated(captured: Captured, images: torch.Tensor, wanted: dict[str, torch.Tensor]) -> None:
    """Require captured operations to compute what they did before their streams were rotated.

    Args:
        captured: rotated.
        images: normalised, some of the first.
        wanted: of :func:`check_captured`.

    Raises:
        ValueError: an output has less than 60 dB.
    """
    with exact_floats():
        for name, got in captured(images).items():
            # nobody asks what is at places without a token
            want, got = (of_tokens(x, images) for x in (wanted[name][: len(images)], got))
            if not (db := sqnr_db(want, got)) >= LEAST_READ_DB:
                raise ValueError(
                    f"rotating the residual stream changes output {name!r} of the model: it has {db:.1f} dB, where equal ones "
                    f"have {LEAST_READ_DB:.0f}. This is an error of QFlash, please report it"
                )


def _first_difference(captured: Captured, images: torch.Tensor) -> str:
    """Say at which operation the captured ones begin to differ from the traced graph."""
    parameters = [x for x in captured.module.parameters() if x.is_floating_point()]
    if any(x.dtype in (torch.float16, torch.bfloat16) for x in parameters):
        return "Quantise model.float() to see where"
    wanted: dict[Any, torch.Tensor] = {}

    class Values(Calibration):
        def run_node(self, n: fx.Node) -> Any:
            wanted[n] = super().run_node(n)
            return wanted[n]

    Values(captured.module, {}, False).run(images)
    computed = captured.compute(images)
    last = "the images"
    for operation in captured.operations[1:]:
        want, got = wanted[operation.node], computed[operation]
        where = f"{operation.kind} of {operation.name or 'the model'}"
        if operation.kind != "attention" and want.numel() == got.numel():
            got = got.reshape(want.shape)
            if not (db := sqnr_db(want, got)) >= LEAST_READ_DB and operation.kind not in ("linear",):
                return f"It first differs at {where} ({db:.1f} dB), behind {last}"
        last = where
    return "The traced graph and its operations agree; the model computes something else than torch.export traced"


class _Saturation(TorchDispatchMode):
    """Counts int8 activations, and those that were clipped: each operator is run again with room for them.

    Attributes:
        clipped, total: elements.
        visible: bool (batch, tokens), which places of texts count; None for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clipped = self.total = 0
        self.visible: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) == "qflash" and isinstance(out, torch.Tensor) and out.dtype == torch.int8:
            self.total += self._counted(func, out).numel()
            wide = self._unclipped(func, args)
            # attention's are floats, which round to integers
            ends = (-128.5, 127.5) if wide.is_floating_point() else (-128, 128)
            self.clipped += int(self._counted(func, (wide < ends[0]) | (wide >= ends[1])).sum())
        return out

    def _counted(self, func: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the elements that count."""
        if self.visible is None:
            return x
        if func.overloadpacket is torch.ops.qflash.int8_attention:
            x = x.transpose(1, 2)
        return x[self.visible] if x.shape[:2] == self.visible.shape else x

    def _unclipped(self, func: Any, args: Any) -> torch.Tensor:
        """Return what an operator would give with room beyond int8, in its output's unit."""
        ops = torch.ops.qflash
        packet = func.overloadpacket
        if (name := str(packet).removeprefix("qflash.int8_linear_")) in op.ACTIVATIONS:
            *layer, factor, offset, shift, backend = args
            sums = ops.int8_linear(*layer, None, None, torch.int32, backend)
            return (op.ACTIVATIONS[name][0](sums) * factor + offset) >> shift
        wide: torch.Tensor
        if packet is ops.int8_attention:
            wide = func(*args[:9], None, torch.float32, *args[11:]) / args[9]
        else:
            # those of a layer end in the type and the back end
            wide = func(*args[:-2], torch.int32, args[-1])
        return wide


def judge(
    network: IntegerNetwork, lowering: Lowering, images: torch.Tensor, normalised: torch.Tensor,
    wanted: dict[str, torch.Tensor], held_out: bool, min_sqnr: float | None, where: str = "",
) -> Quality:  # fmt: skip
    """Compare an integer network with its float model.

    Args:
        network: to judge.
        lowering: that it was made of.
        images: uint8.
        normalised: the same for the float network.
        wanted: the model's outputs for them.
        held_out: whether the network's ranges are of other images.
        min_sqnr: least SQNR in dB; None for any.
        where: what messages say behind "images".

    Raises:
        ValueError: the network is not as close; the message names the nodes that lose most.
    """
    with torch.inference_mode():
        with _Saturation() as saturation:
            parts = []
            for part in images.split(_BATCH):
                saturation.visible = is_token(part) if network.is_padded else None
                parts.append(network.run(part))
        outs = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        for name, out in outs.items():
            if out.shape != wanted[name].shape:
                raise ValueError(
                    f"output {name!r} of the integer network has shape {tuple(out.shape)}, the model's has "
                    f"{tuple(wanted[name].shape)}. This is an error of QFlash, please report it"
                )
        found = {name: out.to(torch.float32) * network.scales[name] for name, out in outs.items()}
        # nobody asks what is at places without a token
        found, wanted = ({name: of_tokens(x, images) for name, x in each.items()} for each in (found, wanted))
        # of several outputs the worst
        quality = Quality(
            min(sqnr_db(wanted[name], got) for name, got in found.items()),
            min(sqnr_db(want, got) for name in found for want, got in zip(wanted[name], found[name], strict=True)),
            saturation.clipped / max(1, saturation.total), len(images), held_out, tuple(network.float_parts()),
        )  # fmt: skip
        if quality.sqnr_db >= WARN_DB and (min_sqnr is None or quality.sqnr_db >= min_sqnr):
            if not all(_tells_apart(wanted[name], got) for name, got in found.items()):
                warnings.warn(
                    f"the integer network does not tell the {len(images)} calibration images{where} apart: their outputs "
                    f"differ by less than its error, {quality.sqnr_db:.1f} dB", stacklevel=3,
                )  # fmt: skip
            return quality
        with exact_floats():
            worst = _worst_parts(network, lowering, images[:_BATCH], normalised[:_BATCH], quality.sqnr_db)
    level = f"an SQNR of {quality.sqnr_db:.1f} dB against the float model"
    said = f"the integer network has {level} on {len(images)} calibration images{where}"
    if min_sqnr is not None and not quality.sqnr_db >= min_sqnr:
        raise ValueError(
            f"{said}, less than min_sqnr={min_sqnr:g} (None accepts any). Most is lost in {worst}. keep_float leaves parts in "
            "floating point"
        )
    warnings.warn(f"{said}; most is lost in {worst}", stacklevel=3)
    return quality


def _worst_parts(
    network: IntegerNetwork, lowering: Lowering, images: torch.Tensor, normalised: torch.Tensor, sqnr: float
) -> str:
    """Name the nodes behind which the error of the residual stream has grown most, with the SQNR behind each."""
    rows = [(row.name, row.sqnr_db) for row in node_errors(network, lowering, images, normalised) if row.is_stream]
    rows.append(("the last normalisation and the head", sqnr))
    before = [float("inf"), *(db for _, db in rows)]
    grown = [10 ** (-db / 10) - 10 ** (-first / 10) for (_, db), first in zip(rows, before, strict=False)]
    order = sorted(range(len(rows)), key=grown.__getitem__, reverse=True)[:3]
    return ", ".join(f"{rows[i][0]} ({rows[i][1]:.1f} dB after it)" for i in order if grown[i] > 0)
