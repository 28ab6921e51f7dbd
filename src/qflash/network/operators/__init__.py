"""All kinds of node that an integer network has, by name: :data:`OPERATORS`.

An operator of :mod:`..modules` is spread over the files of its back ends and exports. One with a file here has it all in one
place but for its kernels: integers, bounds, schema, fake, and its forms in ONNX and TOSA (:class:`..modules.OwnForms`).
"""

from ..modules import (
    Attention,
    First,
    IntegerModule,
    Join,
    LayerNorm,
    Linear,
    LinearActivation,
    LinearGelu,
    LinearRelu,
    LinearSilu,
    Mean,
    PatchEmbedding,
    WideLinear,
    Widen,
)
from .gated import Gated
from .narrow import Narrow
from .norms import RmsNorm
from .rotary import Rotary
from .select_token import SelectToken
from .token_embedding import TokenEmbedding
from .tokens import Tokens

OPERATORS: dict[str, type[IntegerModule]] = {
    kind.__name__: kind
    for kind in (
        PatchEmbedding,
        LayerNorm,
        Linear,
        WideLinear,
        LinearGelu,
        LinearSilu,
        LinearRelu,
        Attention,
        Mean,
        First,
        Join,
        Widen,
        Gated,
        Tokens,
        Rotary,
        RmsNorm,
        Narrow,
        TokenEmbedding,
        SelectToken,
    )
}
"""Kinds of node of an integer network, by name."""
WITH_ACTIVATION = {kind.activation: kind for kind in OPERATORS.values() if issubclass(kind, LinearActivation)}
"""Linear layers by the activation behind them."""
