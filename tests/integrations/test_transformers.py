"""register_attention(): small models of transformers attend with QFlash, by name."""

from __future__ import annotations

import builtins
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import qflash
from helpers import make_inputs, same_bits
from qflash.integrations import transformers as hugging_face
from qflash_lab.bench.metrics import sqnr

transformers = pytest.importorskip("transformers", minversion="4.53")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
IMAGES = {**SMALL, "image_size": 32, "patch_size": 8}
BUILDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTModel", "ViTConfig", IMAGES),
    "deit": ("DeiTModel", "DeiTConfig", IMAGES),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", IMAGES),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES),
    "dinov2": ("Dinov2Model", "Dinov2Config", IMAGES),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 28, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7},
    ),
    "llama": ("LlamaModel", "LlamaConfig", {**SMALL, "num_key_value_heads": 1, "vocab_size": 50, "pad_token_id": 0}),
}


@pytest.fixture(autouse=True)
def registered() -> str:
    return qflash.register_attention()


def looks_up(model: object) -> bool:
    """Tell whether this version's model looks its attention up; Swin does not before transformers 5."""
    return bool(getattr(model, "_supports_sdpa", False))


def build(name: str, **options: Any) -> nn.Module:
    kind, config, settings = BUILDERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings, **options)).eval()
    if not looks_up(model):
        pytest.skip(f"{kind} of transformers {transformers.__version__} does not look its attention up")
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "llama":
        # the first of the second text is padding
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, :5] = 0
        return {"input_ids": torch.randint(1, 50, (2, 20), generator=generator), "attention_mask": mask}
    size = BUILDERS[name][2]["image_size"]
    return {"pixel_values": torch.randn(3, 3, size, size, generator=generator)}


def use(model: nn.Module, name: str) -> None:
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
    else:  # 4.53
        model.config._attn_implementation = name


@pytest.mark.parametrize("name", BUILDERS)
@torch.no_grad()
def test_a_model_attends_with_qflash(name: str) -> None:
    model, given = build(name), inputs(name)
    use(model, "sdpa")
    exact = model(**given).last_hidden_state
    warns = name == "siglip" and hasattr(model, "set_attn_implementation")
    with pytest.warns(UserWarning, match="MultiheadAttention: head.attention") if warns else nullcontext():
        use(model, "integer")
    with mock.patch.object(hugging_face, "attention", wraps=qflash.attention) as called:
        got = model(**given).last_hidden_state
    layers = 4 if name == "swin" else 2
    assert called.call_count == layers
    there = given["attention_mask"].bool() if name == "llama" else ...
    assert sqnr(exact[there], got[there]) > 25.0
    assert not torch.equal(exact, got)
    use(model, "sdpa")
    assert torch.equal(model(**given).last_hidden_state, exact)


def make(kind: str, implementation: str | None = "integer", **settings: Any) -> nn.Module:
    """Build a model of transformers from its own small or usual config, without memory for its weights."""
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = model_class.config_class(**settings)
    # timm's models could not always be built without memory
    with nullcontext() if kind == "TimmWrapperModel" else torch.device("meta"):
        return model_class._from_config(config, attn_implementation=implementation)


FLOATS: dict[str, tuple[str, dict[str, Any]]] = {
    "Swinv2Model": ("Swinv2SelfAttention: encoder.layers.0.blocks.0.attention.self", {"depths": [2, 2], "num_heads": [2, 4]}),
    "DonutSwinModel": ("DonutSwinSelfAttention: ", {"depths": [2, 2], "num_heads": [2, 4]}),
    "PvtV2Model": ("PvtV2SelfAttention: ", {}),
    "LevitModel": ("LevitAttention: .*; LevitAttentionSubsample: ", {}),
    "MobileViTModel": ("MobileViTSelfAttention: ", {}),
    "CvtModel": ("CvtSelfAttention: ", {}),
    "VitDetModel": (r"VitDetAttention: encoder\.layer\.0\.attention, .* and 9 more; qflash.patch\(model\) takes it$", {}),
    "TimmWrapperModel": (
        r"Attention: timm_model\.blocks\.0\.attn, .* and 9 more; qflash.patch\(model\) takes it$",
        {"architecture": "vit_tiny_patch16_224"},
    ),
    # a head only; a part with a config of its own
    "SiglipVisionModel": ("floating point that does not look this name up, MultiheadAttention: ", IMAGES),
    "MaskFormerModel": ("MaskFormerSwinSelfAttention: .* and 21 more", {}),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_attention_that_does_not_look_the_name_up_is_named(kind: str) -> None:
    text, settings = FLOATS[kind]
    with pytest.warns(UserWarning, match=f"attn_implementation='integer': .*{text}") as told:
        model = make(kind, **settings)
    assert len([each for each in told if "attn_implementation=" in str(each.message)]) == 1
    assert qflash.float_attention(model)
    model = make(kind, None, **settings)
    if hasattr(model, "set_attn_implementation"):
        with pytest.warns(UserWarning, match=text):
            model.set_attn_implementation("integer")
    assert not qflash.float_attention(qflash.patch(model, strict=True))


@pytest.mark.parametrize("kind", ["Data2VecVisionModel", "SamVisionModel"])
def test_classes_for_other_names_only_are_refused(kind: str) -> None:
    make(kind, "sdpa")
    with pytest.raises(ValueError, match=rf"must be one of \('eager', 'sdpa'.*\) for {kind}, .* got 'integer'"):
        make(kind)


def test_no_more_is_named_than_was_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    for name, (kind, _, settings) in BUILDERS.items():
        if not looks_up(getattr(transformers, kind)):
            continue
        # with a head of PyTorch's own attention
        if name != "siglip":
            assert not qflash.float_attention(make(kind, **settings)), name
        assert qflash.float_attention(make(kind, "sdpa", **settings)), name
    make("Swinv2Model", "eager")
    parts = {"": "integer", "text_config": "integer", "vision_config": "eager"}
    settings = {"vision_config": IMAGES, "text_config": {**SMALL, "vocab_size": 50}}
    assert len(qflash.float_attention(make("SiglipModel", parts, **settings))) == 3  # type: ignore[arg-type]
    assert not [each for each in recwarn if "attn_implementation=" in str(each.message)]
    with pytest.warns(UserWarning, match=r"MultiheadAttention: (vision_model\.)?head\.attention;"):
        make("SiglipModel", **settings)
    with pytest.raises(TypeError, match="model must be"):
        qflash.float_attention("vit")  # type: ignore[arg-type]


@torch.no_grad()
def test_recipes_have_names_of_their_own() -> None:
    model, given = build("vit"), inputs("vit")
    use(model, "sdpa")
    exact = model(**given).last_hidden_state
    use(model, "integer")
    usual = model(**given).last_hidden_state
    assert qflash.register_attention("integer-accurate", "accurate") == "integer-accurate"
    use(model, "integer-accurate")
    accurate = model(**given).last_hidden_state
    assert sqnr(exact, accurate) > sqnr(exact, usual)
    # registered again the same name means something else
    qflash.register_attention("integer-accurate", backend="reference")
    assert same_bits(model(**given).last_hidden_state, usual)


class Module(nn.Module):
    is_causal = False


def draw(batch: int, heads: int, tokens: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    return make_inputs(batch, heads, tokens, head_dim=head_dim, seed=2)


def call(*shape: int, module: nn.Module | None = None, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    function = hugging_face._function(qflash.DEFAULT, "auto")
    out, weights = function(module or Module(), *draw(*shape), mask, **options)
    assert weights is None
    assert out.is_contiguous()
    return out.transpose(1, 2)


def expected(*shape: int, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    return qflash.attention(*draw(*shape), mask, **options)


def test_arguments_are_those_of_attention() -> None:
    shape = (2, 3, 17, 16)
    bias, allowed = torch.randn(1, 3, 17, 17), torch.rand(2, 1, 17, 17) < 0.7
    assert same_bits(call(*shape), expected(*shape))
    assert same_bits(call(*shape, scaling=0.1), expected(*shape, scale=0.1))
    assert same_bits(call(*shape, is_causal=True), expected(*shape, is_causal=True))
    assert same_bits(call(*shape, module=nn.Identity()), expected(*shape, is_causal=True))
    assert same_bits(call(*shape, mask=allowed, is_causal=True), expected(*shape, mask=allowed))
    # a mask for more keys than there are yet
    assert same_bits(call(*shape, mask=torch.nn.functional.pad(allowed, (0, 3))), expected(*shape, mask=allowed))
    assert same_bits(call(*shape, position_bias=bias), expected(*shape, mask=bias))
    assert same_bits(call(*shape, position_bias=bias, mask=bias), expected(*shape, mask=2 * bias))
    both = bias.masked_fill(~allowed, -torch.inf)
    assert same_bits(call(*shape, position_bias=bias, mask=allowed), expected(*shape, mask=both))
    lower = bias.masked_fill(~torch.ones(17, 17, dtype=torch.bool).tril(), -torch.inf)
    assert same_bits(call(*shape, position_bias=bias, is_causal=True), expected(*shape, mask=lower))
    assert same_bits(call(1, 2, 1, 16, is_causal=True), expected(1, 2, 1, 16))
    assert same_bits(call(*shape, softcap=None, output_attentions=False), expected(*shape))


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(3)}, {"cache": object()}])
def test_what_it_cannot_do_is_said(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}.*Module"):
        call(1, 3, 5, 16, **option)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_weights_that_are_wanted_are_none_as_with_sdpa(name: str) -> None:
    model, given = build(name), inputs(name)
    use(model, "sdpa")
    wanted = model(**given, output_attentions=True).attentions
    if any(x is not None for x in wanted or ()):
        pytest.skip('this transformers computes weights in eager attention where "sdpa" is chosen')
    use(model, "integer")
    with torch.no_grad(), pytest.warns(UserWarning, match='output_attentions=True: .*attn_implementation="eager" has them'):
        out = model(**given, output_attentions=True)
    assert out.attentions == wanted
    with torch.no_grad():
        assert same_bits(out.last_hidden_state, model(**given).last_hidden_state)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_a_patched_model_gives_the_weights_that_it_gives_unpatched(name: str) -> None:
    given = inputs(name)
    for implementation in ("sdpa", "eager"):
        model = build(name)
        use(model, implementation)
        with torch.no_grad():
            wanted = model(**given, output_attentions=True).attentions
            qflash.patch(model)
            got = model(**given, output_attentions=True).attentions
        # older releases give none, a None for each layer, or eager attention's where "sdpa" is chosen
        assert [None if x is None else x.shape for x in got] == [None if x is None else x.shape for x in wanted]
        assert implementation != "eager" or (len(got) == 2 and all(x is not None for x in got))
        if got and got[0] is not None:  # the next layer's are of what integer attention gave
            assert sqnr(wanted[0], got[0]) > 100.0
        assert all(layer.is_integer for layer in qflash.coverage(model))


def test_dropout_raises() -> None:
    model = build("vit", attention_probs_dropout_prob=0.1).train()
    use(model, "integer")
    with pytest.raises(RuntimeError, match=r"dropout 0\.1"):
        model(**inputs("vit"))


@pytest.mark.parametrize("name", ["", "sdpa", "eager", "qflash", "paged|integer", "somebody/integer"])
def test_names_of_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        qflash.register_attention(name)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="name"):
        qflash.register_attention(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe"):
        qflash.register_attention(recipe="best")
    with pytest.raises(ValueError, match="backend"):
        qflash.register_attention(backend="tpu")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(name)
        return usual(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"qflash\[transformers\]"):
        qflash.register_attention()


def test_static_scales_are_for_patched_models() -> None:
    named = build("vit", attn_implementation="integer")
    with pytest.raises(ValueError, match="must be patched first"):
        qflash.calibrate(named, [inputs("vit")], progress=False)
    model = qflash.patch(build("vit", attn_implementation="sdpa"))
    qflash.calibrate(model, [inputs("vit")], progress=False)
    assert len(qflash.coverage(model).static) == SMALL["num_hidden_layers"]
    with torch.inference_mode():
        got = model(**inputs("vit")).last_hidden_state
        want = qflash.unpatch(model)(**inputs("vit")).last_hidden_state
    assert sqnr(want, got) > 35
