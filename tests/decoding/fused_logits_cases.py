"""A step of decoding through fused layers against the plain step: on a GPU, or in Triton's interpreter."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from test_recorded_search import make_batch, make_model, shake
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qknorm.attention import MultiheadAttention
from qknorm.attention.dropout import Dropout
from qknorm.config import Attention
from qknorm.decoding.beam_decoder import BeamDecoder, Counters, Extent
from qknorm.decoding.recorded_search import RecordedSearch
from qknorm.models import fused_kernels, fused_translator
from qknorm.models.fused_run import use_fused
from qknorm.models.quantized import quantize
from qknorm.models.translator import Memory, Translator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, BEAM = 3, 3
SETTINGS: list[dict[str, Any]] = [
    {},
    {"norm": "scale", "attention": Attention(qk_norm="none")},
    {"norm": "rms", "fixnorm": False, "language_vectors": False},
    {"positions": "rotary", "kv_heads": 2, "language_vectors": True},
    {"positions": "sinusoid-slip", "tie": "none", "activation": "gelu"},
    {"tie": "target", "activation": "swiglu"},
    {"attention": Attention(cross_query_norm="width", scale_per_head=True), "fixnorm": False, "tie": "none"},
]


def make(options: dict[str, Any]) -> Translator:
    """A model of 29 types, not all of which may be produced, that would drop half of all in training."""
    model = make_model(options, 0, 1.0, str(DEVICE))
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.5
        elif isinstance(module, MultiheadAttention):
            module.dropout = 0.5
    model.allowed[5::7] = False
    return model


class Passes:
    """How often each kernel was started, and how often the fused decoder ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: dict[str, int] = {}
        self.decoded = 0
        for name in ("add_norm_forward", "embed_forward"):
            monkeypatch.setattr(fused_kernels, name, self._counted(name))
        decode = fused_translator.decode

        def counted(*inputs: Any) -> Tensor:
            self.decoded += 1
            return decode(*inputs)

        monkeypatch.setattr(fused_translator, "decode", counted)

    def _counted(self, name: str) -> Any:
        kernel, kernels = getattr(fused_kernels, name), self.kernels

        class Counted:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                kernels[name] = kernels.get(name, 0) + 1
                launch: Callable[..., None] = kernel[grid]
                return launch

        return Counted()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@contextmanager
def plain() -> Iterator[None]:
    """Within it no step is fused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamDecoder, "_fused", lambda self: nullcontext())
        yield


def logits_of_steps(model: Translator, words_tbk: Tensor, precision: torch.dtype) -> list[Tensor]:
    """In buffers that hold more than the steps read, with hypotheses that stay where they are."""
    decoder = BeamDecoder(model, Extent(3, BEAM, 16, 32), precision)
    source, _ = make_batch_once()
    decoder.source[:, : source.shape[1]] = source.to(DEVICE)
    counters, found = Counters(BEAM, DEVICE), []
    with torch.no_grad():
        decoder.read_source()
        for words_bk in words_tbk:
            found.append(decoder.logits(words_bk, 16, counters).clone())
            counters.count_on()
    return found


def make_batch_once() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return make_batch([4, 9, 1], 1)


def logits_of_whole_targets(model: Translator, words_tbk: Tensor, precision: torch.dtype) -> Tensor:
    """The reference: `Translator.score` of all that was decoded, read at once, each hypothesis a row (b·k, t, v)."""
    source = make_batch_once()[0][:2].to(DEVICE)
    half = precision.itemsize < 4
    with torch.no_grad(), torch.autocast(DEVICE.type, precision if half else None, enabled=half):
        states, real = (x.repeat_interleave(BEAM, dim=0) for x in model.encode(source))
        return model.score(model.decode(words_tbk.permute(1, 2, 0).flatten(0, 1), Memory(states, real)))


def draw_words() -> Tensor:
    return torch.randint(4, 29, (STEPS, 2, BEAM), device=DEVICE)


@pytest.mark.parametrize(
    ("precision", "near", "options"),
    [
        *((torch.float32, 1e-5, options) for options in SETTINGS),
        *((torch.bfloat16, 0.05, options) for options in SETTINGS),
        *((torch.float16, 0.01, options) for options in SETTINGS[:2]),
    ],
    ids=str,
)
def test_fused_steps_give_the_logits_of_plain_ones(
    passes: Passes, options: dict[str, Any], precision: torch.dtype, near: float
) -> None:
    model, words = make(options), draw_words()
    found = logits_of_steps(model, words, precision)
    assert passes.decoded == STEPS
    with plain():
        expected = logits_of_steps(model, words, precision)
    assert passes.decoded == STEPS
    whole = logits_of_whole_targets(model, words, precision)
    for t, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        assert mine.dtype == reference.dtype == precision and mine.shape == (2, BEAM, 29)
        assert (mine == -torch.inf).any(dim=(0, 1)).tolist() == (~model.allowed).tolist()
        assert float(mine[mine.isfinite()].std()) > 0.3
        scale = float(reference[reference.isfinite()].abs().max())
        torch.testing.assert_close(mine, reference, atol=near * scale, rtol=near)
        torch.testing.assert_close(mine, whole[:, t].view_as(mine), atol=near * scale, rtol=near)


def test_a_step_has_one_kernel_for_its_words_and_one_for_each_sum_and_norm(passes: Passes) -> None:
    class Watch(TorchDispatchMode):
        seen: list[str]
        with_table: set[str]

        def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
            self.seen.append(str(function))
            if any(isinstance(x, Tensor) and x.shape[:1] in ((29,), (32,)) for x in inputs):
                self.with_table.add(str(function))
            return function(*inputs, **(options or {}))

    model = make({"attention": Attention(qk_norm="none")})
    decoder = BeamDecoder(model, Extent(2, BEAM, 16, 32), torch.bfloat16)
    decoder.source.fill_(5)
    with torch.no_grad():
        decoder.read_source()
        with Watch() as watch:
            watch.seen, watch.with_table = [], set()
            decoder.logits(draw_words()[0], 16, Counters(BEAM, DEVICE))
    assert passes.kernels == {"embed_forward": 1, "add_norm_forward": 1 + 3 * 2}
    products = [name for name in watch.seen if "addmm" in name]
    assert len(products) == 2 * 6 + 1 and products.count("aten._addmm_activation.default") == 2
    assert "aten.addmm.default" in watch.with_table, "the logits"
    assert not [name for name in watch.with_table for made in ("copy", "pad", "fill", "clone") if made in name]
    assert watch.seen.count("aten.index_select.default") == 1  # of the position
    assert not {"aten.native_layer_norm.default", "aten.relu.default", "aten.embedding.default"} & set(watch.seen)


@pytest.mark.parametrize("options", [{"norm_position": "post"}, {"norm": "none"}])
def test_what_kernels_are_not_made_for_stays_plain(passes: Passes, options: dict[str, Any]) -> None:
    model, words = make(options), draw_words()
    found = logits_of_steps(model, words, torch.float32)
    whole = logits_of_whole_targets(model, words, torch.float32)
    assert passes.decoded == 0 and not passes.kernels
    for t, mine in enumerate(found):
        torch.testing.assert_close(mine, whole[:, t].view_as(mine), atol=1e-4, rtol=1e-4)


def test_models_in_training_in_float64_and_of_another_kind_stay_plain(passes: Passes) -> None:
    words = draw_words()
    logits_of_steps(make({}).train(), words, torch.float32)
    logits_of_steps(make({}).double(), words, torch.float64)
    if DEVICE.type == "cpu":
        model = quantize(make({}))
        found = logits_of_steps(model, words, torch.float32)[-1]
        whole = logits_of_whole_targets(model, words, torch.float32)[:, -1]
        torch.testing.assert_close(found, whole.view_as(found), atol=0.1, rtol=0.1)
    assert passes.decoded == 0 and not passes.kernels


class Raised(nn.Linear):
    """Adds 1 to what the map gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def replace_widen(model: Translator) -> None:
    forward = model.decoder[0].feed_forward
    forward.widen = Raised(16, 24).to(DEVICE)


def replace_norm(model: Translator) -> None:
    model.decoder[1].around_cross_attention.norm = nn.Sequential(nn.LayerNorm(16), nn.Tanh()).to(DEVICE)


def replace_feed_forward(model: Translator) -> None:
    model.decoder[0].feed_forward = Raised(16, 16).to(DEVICE)


def hook_layer(model: Translator) -> None:
    model.decoder[0].register_forward_hook(lambda module, inputs, states: states + 0.5)


def hook_widen(model: Translator) -> None:
    model.decoder[0].feed_forward.widen.register_forward_pre_hook(lambda module, inputs: inputs[0] + 0.5)


def wrap_norm(model: Translator) -> None:
    norm = model.decoder_norm
    norm.forward = functools.partial(nn.LayerNorm.forward, norm)


@pytest.mark.parametrize(
    "change", [replace_widen, replace_norm, replace_feed_forward, hook_layer, hook_widen, wrap_norm]
)
def test_a_decoder_in_which_somebody_changed_a_part_stays_plain(
    passes: Passes, change: Callable[[Translator], None]
) -> None:
    model, words = make({}), draw_words()
    change(model.requires_grad_(False))
    found = logits_of_steps(model.eval(), words, torch.float32)
    whole = logits_of_whole_targets(model, words, torch.float32)
    assert passes.decoded == 0 and not passes.kernels
    for t, mine in enumerate(found):
        torch.testing.assert_close(mine, whole[:, t].view_as(mine), atol=1e-4, rtol=1e-4)


def test_a_map_that_somebody_replaced_is_called() -> None:
    """Also in a pass that is fused around it."""
    model, ids = make({}), torch.randint(4, 29, (2, 5), device=DEVICE)
    with torch.no_grad():
        before = model(ids, ids)
        replace_widen(model)
        model.eval()
        expected = model(ids, ids)
        with use_fused(DEVICE, layers=True):
            found = model(ids, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


def test_weights_that_were_learned_meanwhile_are_read_anew() -> None:
    model, words = make({"tie": "none"}), draw_words()
    decoder = BeamDecoder(model, Extent(2, BEAM, 16, 32), torch.bfloat16)
    source = make_batch_once()[0][:2]
    decoder.source[:, : source.shape[1]] = source.to(DEVICE)
    for _ in range(2):
        with torch.no_grad():
            decoder.read_source()
            found = decoder.logits(words[0], 16, Counters(BEAM, DEVICE))
        expected = logits_of_whole_targets(model, words, torch.bfloat16)[:, 0].view_as(found)
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0.05)
        shake(model, 0.3)
        model.allowed[:4] = False
    changed = logits_of_whole_targets(model, words, torch.bfloat16)[:, 0].view_as(found)
    assert float((found - changed)[..., 6:12].abs().max()) > 1.0


def test_a_search_finds_the_same_and_leaves_everything_as_it_was(passes: Passes) -> None:
    """With shares of dropout that would show, and fused steps also where the search's own part is plain."""
    model = make({})
    source, limits = make_batch([3, 5], 5)
    kept, flags = {name: x.clone() for name, x in model.state_dict().items()}, [m.training for m in model.modules()]
    torch.manual_seed(11)
    before = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if DEVICE.type == "cuda" else [])]
    found = [RecordedSearch(model, torch.float32, fused=fused)(source, limits, beam=BEAM) for fused in (True, False)]
    after = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if DEVICE.type == "cuda" else [])]
    assert all(torch.equal(mine, state) for mine, state in zip(after, before, strict=True))
    assert [m.training for m in model.modules()] == flags and not any(flags)
    assert all(torch.equal(x, kept[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    count = passes.decoded
    with plain():
        expected = RecordedSearch(model, torch.float32)(source, limits, beam=BEAM)
    assert count > 4 and passes.decoded == count
    for mine in found:
        assert [best.tokens for best, *_ in mine] == [best.tokens for best, *_ in expected]
        for (one, *_), (reference, *_) in zip(mine, expected, strict=True):
            assert one.score == pytest.approx(reference.score, abs=1e-4)


@pytest.mark.parametrize("parts", [{"layers": True}, {"layers": True, "linear": True}])
def test_whole_passes_out_of_training_are_fused_too_and_drop_nothing(parts: dict[str, bool]) -> None:
    model, seed = make({"language_vectors": True}), torch.zeros(1, dtype=torch.long, device=DEVICE)
    source, target = make_batch_once()[0].to(DEVICE), torch.randint(4, 29, (3, 5), device=DEVICE)
    expected = model(source, target)
    state = torch.get_rng_state()
    with use_fused(DEVICE, seed=seed, **parts) as run:
        found = model(source, target)
    assert run is not None and run.sites > 4 and torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    wanted = [torch.autograd.grad(x[x.isfinite()].pow(2).sum(), list(model.parameters())) for x in (found, expected)]
    for mine, reference in zip(*wanted, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-2, rtol=1e-3)


def test_nothing_is_kept_for_a_gradient_that_nobody_wants() -> None:
    model = make({})
    decoder = BeamDecoder(model, Extent(2, BEAM, 16, 32), torch.float32)
    decoder.source.fill_(5)
    with torch.no_grad():
        decoder.read_source()
        found = decoder.logits(draw_words()[0], 16, Counters(BEAM, DEVICE))
    assert not found.requires_grad and found.grad_fn is None


def test_shares_count_in_training_alone() -> None:
    """What is fused out of training has the dropout of the settings at hand, and must not take it."""
    model = make({})
    assert model.decoder[0].around_attention.dropout.p == model.dropout.p == 0.5
    ids = torch.randint(4, 29, (2, 5), device=DEVICE)
    with use_fused(DEVICE, layers=True), torch.no_grad():
        still = [model(ids, ids) for _ in range(2)]
        loose = [model.train()(ids, ids) for _ in range(2)]
    assert torch.equal(*still) and not torch.equal(*loose)
