"""The masks of torch.nn.MultiheadAttention: their shapes, and what they say beside is_causal and beside a cache."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qknorm import KeyValueCache, MultiheadAttention, adopt
from qknorm.attention import multihead, torch_masks

SQUARE = nn.Transformer.generate_square_subsequent_mask


def alibi(t: int) -> Tensor:
    """Causal, and the less a key counts the farther it is."""
    distance = torch.arange(t)[:, None] - torch.arange(t)
    return -0.7 * distance.float().masked_fill(distance < 0, math.inf)


def padding(batch: int, keys: int) -> Tensor:
    hidden = torch.zeros(batch, keys, dtype=torch.bool)
    hidden[1, -1] = True
    return hidden


@pytest.fixture
def masks_given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of every attention without weights: whether it got a mask, and whether it was to be causal."""
    given: list[tuple[bool, bool]] = []

    def attend(*inputs: Tensor, original: Any = multihead.attend, **settings: Any) -> Tensor:
        given.append((settings["mask"] is not None, settings["is_causal"]))
        found: Tensor = original(*inputs, **settings)
        return found

    monkeypatch.setattr(multihead, "attend", attend)
    return given


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch", [4, 3])
def test_a_mask_for_each_sentence_is_not_taken_for_one_of_each_head(batch: int, need_weights: bool) -> None:
    x, mask = torch.randn(batch, 5, 16), torch.rand(batch, 5, 5) > 0.5
    with pytest.raises(ValueError, match=rf"\({batch}, 5, 5\), but should have \(5, 5\), or \({4 * batch}, 5, 5\)"):
        MultiheadAttention(16, 4, batch_first=True)(x, x, x, attn_mask=mask, need_weights=need_weights)
    with pytest.raises(RuntimeError, match=rf"should be \({4 * batch}, 5, 5\)"):
        nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x, attn_mask=mask, need_weights=need_weights)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attn_mask", (4, 5)),
        ("attn_mask", (5, 1)),
        ("attn_mask", (1, 5)),
        ("attn_mask", (5,)),
        ("attn_mask", (8, 5, 1)),
        ("key_padding_mask", (2, 1)),
        ("key_padding_mask", (1, 5)),
        ("key_padding_mask", (5, 2)),
        ("key_padding_mask", (5,)),
        ("key_padding_mask", (2, 1, 5)),
    ],
)
def test_shapes_that_torch_refuses_are_refused(name: str, shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(2, 5, 16), {name: torch.zeros(shape, dtype=torch.bool)}
    with pytest.raises(ValueError, match=f"{name} (has the shape|must be)"):
        MultiheadAttention(16, 4, batch_first=True)(x, x, x, **mask)
    with pytest.raises((RuntimeError, AssertionError)):
        nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x, **mask)


def test_a_mask_by_sentence_and_head_is_taken() -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    mask = torch.rand(2, 4, 5, 5) > 0.5
    expected = module(x, x, x, attn_mask=mask.flatten(0, 1))[0]
    torch.testing.assert_close(module(x, x, x, attn_mask=mask)[0], expected)
    expected = module(x, x, x, attn_mask=mask[:, :1].expand(2, 4, 5, 5).flatten(0, 1))[0]
    torch.testing.assert_close(module(x, x, x, attn_mask=mask[:, :1])[0], expected)


@pytest.mark.parametrize("extra", [False, True])
def test_decoding_wants_the_padding_of_all_keys(extra: bool) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, add_bias_kv=extra, add_zero_attn=extra).eval()
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 0] = hidden[0, 2] = True
    how: dict[str, Any] = {"is_causal": True, "need_weights": False}
    with torch.no_grad():
        whole = module(x, x, x, key_padding_mask=hidden, **how)[0]
        cache, parts = KeyValueCache(), []
        for i, now in enumerate(x.split(1, dim=1)):
            parts.append(module(now, now, now, key_padding_mask=hidden[:, : i + 1], cache=cache, **how)[0])
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=1e-5)
        with pytest.raises(ValueError, match=r"\(2, 1\), but should have \(2, 6\).*with a cache all of them"):
            module(now, now, now, key_padding_mask=hidden[:, :1], cache=cache, **how)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["float", "bool", "by head", "square"])
def test_a_mask_beside_is_causal_is_used(kind: str, padded: bool, options: dict[str, bool], need_weights: bool) -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True, **options), torch.randn(2, 5, 16)  # type: ignore[arg-type]
    mask = {
        "float": alibi(5),
        "bool": torch.ones(5, 5, dtype=torch.bool).triu(1) | torch.ones(5, 5, dtype=torch.bool).tril(-3),
        "by head": alibi(5) * torch.arange(1, 9).view(8, 1, 1),
        "square": SQUARE(5),
    }[kind]
    how = {"attn_mask": mask, "key_padding_mask": padding(2, 5) if padded else None, "need_weights": need_weights}
    hinted, expected = (module(x, x, x, is_causal=hint, **how)[0] for hint in (True, False))
    torch.testing.assert_close(hinted, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_bias_that_hides_nothing_stays_beside_is_causal_and_nobody_sees_ahead(need_weights: bool) -> None:
    module, x, bias = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16), torch.randn(5, 5)
    found = module(x, x, x, attn_mask=bias, is_causal=True, need_weights=need_weights)[0]
    expected = module(x, x, x, attn_mask=bias + SQUARE(5), need_weights=need_weights)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("keys", [5, 8])
def test_beside_a_mask_is_causal_hides_what_it_hides_alone(keys: int, boolean: bool, need_weights: bool) -> None:
    module, x, memory = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16), torch.randn(2, keys, 16)
    nothing = torch.zeros(5, keys, dtype=torch.bool if boolean else torch.float32)
    how: dict[str, Any] = {"is_causal": True, "need_weights": need_weights}
    found, expected = (module(x, memory, memory, attn_mask=mask, **how)[0] for mask in (nothing, None))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}])
def test_with_more_queries_than_keys_the_mask_alone_decides(options: dict[str, bool]) -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True, **options), torch.randn(2, 5, 16)  # type: ignore[arg-type]
    for mask in (torch.zeros(5, 3), torch.rand(5, 3) > 0.6, torch.ones(5, 3, dtype=torch.bool).triu(1)):
        how: dict[str, Any] = {"attn_mask": mask, "need_weights": False}
        hinted, expected = (module(x, x[:, :3], x[:, :3], is_causal=hint, **how)[0] for hint in (True, False))
        torch.testing.assert_close(hinted, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("keys", [5, 8, 3])
def test_a_memory_mask_counts_from_the_first_key_as_torchs(keys: int) -> None:
    torch.manual_seed(2)
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, keys, 16)
    mask = torch.ones(5, keys, dtype=torch.bool).triu(1)
    for layer in theirs.layers:
        layer.self_attn, layer.multihead_attn = (_plain_of(m) for m in (layer.self_attn, layer.multihead_attn))
    ours = theirs(x, memory, memory_mask=mask, memory_is_causal=True)
    torch.testing.assert_close(ours, theirs(x, memory, memory_mask=mask), atol=1e-6, rtol=1e-5)
    torch.manual_seed(2)
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    expected = theirs(x, memory, memory_mask=mask, memory_is_causal=True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def _plain_of(theirs: nn.MultiheadAttention) -> MultiheadAttention:
    ours = MultiheadAttention(theirs.embed_dim, theirs.num_heads, batch_first=True, qk_norm="none")
    ours.load_state_dict(theirs.state_dict())
    return ours


def test_alibi_and_padding_in_an_adopted_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    adopt(encoder, length=5)
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5).masked_fill(padding(2, 5), -math.inf)
    hinted, expected = (
        encoder(x, mask=alibi(5), src_key_padding_mask=hidden, is_causal=hint) for hint in (True, False)
    )
    torch.testing.assert_close(hinted, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_mask_that_torchs_encoder_finds_causal_is_put_aside(
    masks_given: list[tuple[bool, bool]], training: bool
) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train(training)
    adopt(encoder, length=5)
    x, mask = torch.randn(2, 5, 16), SQUARE(5)
    found = encoder(x, mask=mask)
    assert masks_given == [(False, True)] * 3
    torch.testing.assert_close(found, encoder(x, mask=mask, is_causal=False), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_one_look_serves_all_layers_and_steps_until_the_mask_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    equal = torch.equal
    monkeypatch.setattr(torch_masks.torch, "equal", lambda *both: looks.append(equal(*both)) or looks[-1])
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    adopt(encoder, length=5)
    encoder, x, mask = encoder.cuda(), torch.randn(2, 5, 16, device="cuda"), SQUARE(5, device="cuda")
    for _ in range(2):
        encoder(x, mask=mask, is_causal=True)
    assert looks == [True]
    mask[3:, 1] = -math.inf
    encoder(x, mask=mask, is_causal=True)
    assert looks == [True, False]


def write_in_place(mask: Tensor, hides: float) -> None:
    mask[3:, 1] = hides


def write_past_autograd(mask: Tensor, hides: float) -> None:
    mask.data[3:, 1] = hides


def write_by_numpy(mask: Tensor, hides: float) -> None:
    mask.numpy()[3:, 1] = hides


@pytest.mark.parametrize("write", [write_in_place, write_past_autograd, write_by_numpy])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_that_has_changed_is_looked_at_again(
    masks_given: list[tuple[bool, bool]], boolean: bool, write: Callable[[Tensor, float], None]
) -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    mask = SQUARE(5) == -math.inf if boolean else SQUARE(5)
    how: dict[str, Any] = {"attn_mask": mask, "need_weights": False}
    module(x, x, x, is_causal=True, **how)
    write(mask, True if boolean else -math.inf)
    found = module(x, x, x, is_causal=True, **how)[0]
    assert masks_given == [(False, True), (True, False)]
    torch.testing.assert_close(found, module(x, x, x, **how)[0])


def test_in_inference_mode_a_mask_that_has_changed_is_used() -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    with torch.inference_mode():
        mask = SQUARE(5)
        module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        mask[3:, 1] = -math.inf
        found = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        torch.testing.assert_close(found, module(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_a_mask_that_learns_is_not_put_aside() -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    gradients = []
    for hint in (True, False):
        bias = SQUARE(5).requires_grad_()
        module(x, x, x, attn_mask=bias, is_causal=hint, need_weights=False)[0].square().sum().backward()
        gradients.append(bias.grad)
    assert gradients[1] is not None and gradients[1].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_compiled_module_takes_the_mask_as_it_comes() -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True, backend="sdpa"), torch.randn(2, 5, 16)
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for mask in (SQUARE(5), alibi(5)):
        found = compiled(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        expected = module(x, x, x, attn_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("dynamic", "times"), [(None, 3), (True, 1)])  # by itself: at first, for b, for t
def test_a_compiled_module_is_not_compiled_for_every_shape_anew(dynamic: bool | None, times: int) -> None:
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = MultiheadAttention(16, 4, batch_first=True, backend="sdpa")
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(module), backend=keep, fullgraph=True, dynamic=dynamic)
    for b, t in ((2, 5), (3, 5), (3, 7), (4, 9), (6, 8), (5, 11)):
        x, padding = torch.randn(b, t, 16), torch.zeros(b, t, dtype=torch.bool)
        padding[0, t - 2 :] = True
        found, expected = (
            each(x, x, x, key_padding_mask=padding, need_weights=False)[0] for each in (compiled, module)
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert len(graphs) == times


class Reader(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.attention(x, memory, memory, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return out


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"rotary": "after_norm"}])
def test_an_exported_module_takes_masks_of_any_shape(options: dict[str, Any]) -> None:
    model = Reader(**options).eval()
    b, t, s = (torch.export.Dim(name) for name in "bts")
    example = (torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.ones(5, 7, dtype=torch.bool).triu(1))
    program = torch.export.export(model, example, dynamic_shapes=({0: b, 1: t}, {0: b, 1: s}, {0: t, 1: s}))
    for queries, keys in ((4, 9), (9, 4), (6, 6)):
        inputs = torch.randn(3, queries, 16), torch.randn(3, keys, 16), torch.rand(queries, keys) > 0.5
        torch.testing.assert_close(program.module()(*inputs), model(*inputs), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("example", [(5, 5), (5, 7), (7, 5)])
def test_a_traced_module_takes_masks_of_any_shape(example: tuple[int, int]) -> None:
    model = Reader(backend="sdpa").eval()

    def draw(queries: int, keys: int) -> tuple[Tensor, ...]:
        return torch.randn(2, queries, 16), torch.randn(2, keys, 16), torch.randn(queries, keys)

    with torch.no_grad():
        traced = torch.jit.trace(model, draw(*example))
        for sizes in ((4, 9), (9, 4), (6, 6)):
            inputs = draw(*sizes)
            torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_without_numbers_give_the_shapes(is_causal: bool, dtype: torch.dtype | None, need_weights: bool) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, device="meta")
    x = torch.empty(2, 5, 16, device="meta")
    mask = None if dtype is None else torch.empty(5, 5, dtype=dtype, device="meta")
    output, weights = module(x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=need_weights)
    assert output.is_meta and output.shape == x.shape
    assert weights is None if not need_weights else weights is not None and weights.shape == (2, 5, 5)
