"""The monitor: measures when it is due, stops nothing, leaves nothing behind, and says what it found."""

import copy
import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from direct import direct
from small_models import OwnAttention, assert_same, batch, step, translator
from test_measures import agree
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.adopt import adopt
from qknorm.inspection import monitor as monitor_module
from qknorm.inspection.monitor import AttentionMonitor, capture
from qknorm.inspection.watching.capture import compiled_parts


def test_what_cannot_be_read_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(OwnAttention()), torch.randn(2, 5, 8)
    before = step(model, x)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(monitor_module.Call, "measure", fail)
    with AttentionMonitor(model, every=1) as monitor, pytest.warns(UserWarning, match="0 .it could not be read: "):
        assert_same(before, step(model, x))
    assert monitor.table() == "no attention could be seen; monitor.unseen says why"
    assert not monitor.latest and monitor.unseen == {"0": "it could not be read: out of memory"}


def test_a_model_without_attention_is_told_once_and_goes_on() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 5, 8)
    before = step(model, x)
    monitor = AttentionMonitor(model, every=1)  # attention is found as it runs, so that nothing is said of it here
    assert monitor.table() == monitor_module.NOTHING_YET
    with monitor:
        with pytest.warns(UserWarning, match="records nothing of Sequential: no attention ran in the pass that was"):
            assert_same(before, step(model, x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(before, step(model, x))
    assert monitor.table() == monitor_module.NONE_RAN
    with pytest.warns(UserWarning, match="records nothing of Sequential: no attention ran"):
        AttentionMonitor(model).probe(lambda: model(x))


def test_attentions_that_cannot_be_watched_are_named_in_the_warning() -> None:
    class StrangeAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x.mT, dim=-1) @ x

    model, x = nn.Sequential(StrangeAttention(), StrangeAttention()), torch.randn(2, 5, 8)
    told = r"could not be watched: 0 \(StrangeAttention is no attention that.*\), and 1 more in monitor\.unseen"
    with pytest.warns(UserWarning, match=told):
        AttentionMonitor(model).probe(lambda: model(x))


def test_a_model_whose_attention_is_seen_gets_no_warning() -> None:
    model, x = nn.Sequential(OwnAttention(), nn.Linear(8, 8)), torch.randn(2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with AttentionMonitor(model, every=1) as monitor:
            step(model, x)
    assert list(monitor.latest) == ["0"]


def test_an_error_of_the_model_passes_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(OwnAttention())
    with AttentionMonitor(model, every=1) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 9))
        model(torch.randn(2, 5, 8))
    assert not any("forward" in vars(module) for module in model.modules())
    assert [sample.step for sample in monitor.history] == [0], "the step is measured when it is taken"
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_shared_module_is_measured_each_time() -> None:
    shared = OwnAttention()
    model = nn.Sequential(shared, nn.Linear(8, 8), shared)
    monitor = AttentionMonitor(model)
    monitor.probe(lambda: model(torch.randn(2, 5, 8)))
    assert list(monitor.latest) == ["0", "0#2"]


def test_monitors_may_be_left_in_any_order_and_one_is_entered_once() -> None:
    model = nn.Sequential(OwnAttention())
    first, second = AttentionMonitor(model, every=1), AttentionMonitor(model, every=1)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="watches already"):
        first.__enter__()
    first.__exit__(None, None, None)
    model(torch.randn(2, 5, 8))
    second.__exit__(None, None, None)
    assert "forward" not in vars(model)
    assert (len(first.history), len(second.history)) == (0, 1)


def test_nothing_measured_is_said_in_the_table() -> None:
    model = nn.Sequential(OwnAttention()).eval()
    with AttentionMonitor(model, every=1) as monitor:
        model(torch.randn(2, 5, 8))
    assert "monitor.probe" in monitor.table()
    monitor.probe(lambda: model(torch.randn(2, 5, 8)))
    assert monitor.table().startswith("attention ")


def test_a_model_that_is_bounded_is_not_told_to_adopt() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    adopt(model, scale_init=500.0)
    with AttentionMonitor(model, every=1) as monitor:
        model(torch.randn(4, 9, 8))
    (warning,) = monitor.warnings()
    assert "saturates" in warning and warning.endswith("; lower the learning rate")


# ------------------------------------------------------------------ in threads


def in_another_thread(run: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()


def test_what_another_thread_runs_is_not_taken_for_the_model() -> None:
    other = OwnAttention()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            in_another_thread(lambda: other(x))
            return x

    model = nn.Sequential(Slow(), OwnAttention())
    with AttentionMonitor(model, every=1) as monitor:
        model(torch.randn(2, 5, 8))
    assert [sample.name for sample in monitor.history] == ["1"]


def test_training_does_not_wait_for_a_thread_that_watches() -> None:
    model = nn.Sequential(OwnAttention())
    with AttentionMonitor(model, every=1) as monitor:
        with capture(nn.Identity()):
            in_another_thread(lambda: model(torch.randn(2, 5, 8)))
        in_another_thread(lambda: model(torch.randn(2, 5, 8)))
    assert [sample.step for sample in monitor.history] == [1]
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


# ------------------------------------------------------------------ when


def samples(monitor: AttentionMonitor) -> list[int]:
    return [sample.step for sample in monitor.history]


def test_forward_passes_in_training_are_counted() -> None:
    model = nn.Sequential(OwnAttention()).train()
    x = torch.randn(2, 5, 8)
    with AttentionMonitor(model, every=3) as monitor:
        for _ in range(7):
            model(x)
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
    assert samples(monitor) == [0, 3, 6]
    model(x)
    assert len(monitor.history) == 3


def test_steps_may_be_counted_by_hand() -> None:
    model = nn.Sequential(OwnAttention()).train()
    with AttentionMonitor(model, every=2) as monitor:
        for _ in range(5):
            for _ in range(3):  # gradients gathered over three passes
                model(torch.randn(2, 5, 8))
            monitor.step()
    assert samples(monitor) == [0, 2, 4]


def test_between_samples_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []
    real = monitor_module.watch
    monkeypatch.setattr(monitor_module, "watch", lambda *args, **more: watched.append(1) or real(*args, **more))
    model = nn.Sequential(OwnAttention()).train()
    with AttentionMonitor(model, every=100):
        for _ in range(50):
            model(torch.randn(2, 5, 8))
            assert "forward" not in vars(model[0])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(watched) == 1


def test_only_the_first_sentences_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(OwnAttention()).train(), torch.randn(6, 5, 8)
    x[2:] *= 100
    with AttentionMonitor(model, every=1, batch=2) as monitor:
        model(x)
    with capture(model) as calls:
        model(x[:2])
    torch.testing.assert_close(monitor.latest["0"].stack(), calls[0].measure().stack())
    monkeypatch.setattr(monitor_module, "MOST_LOGITS", 30)  # long sentences: one alone
    with AttentionMonitor(model, every=1) as monitor:
        model(x)
    with capture(model) as calls:
        model(x[:1])
    torch.testing.assert_close(monitor.latest["0"].stack(), calls[0].measure().stack())


def test_copies_of_a_monitored_model_are_free_of_it() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()
    with AttentionMonitor(model, every=1) as monitor:
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copied, loaded):
            assert other.forward.__self__ is other
            other(torch.randn(2, 5, 8))
        assert not monitor.history
        model(torch.randn(2, 5, 8))
    assert samples(monitor) == [0]


def test_two_monitors_of_one_model_may_end_in_any_order() -> None:
    model, x = nn.Sequential(OwnAttention()).train(), torch.randn(2, 5, 8)
    before = step(model, x)
    one, other = AttentionMonitor(model, every=1), AttentionMonitor(model, every=1)
    with one, other, capture(model) as calls:
        assert_same(before, step(model, x))
    assert samples(one) == samples(other) == [0] and len(calls) == 1
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    model(x)
    other.__exit__(None, None, None)
    model(x)
    assert samples(one) == [0] and samples(other) == [0, 1]


@pytest.mark.parametrize("settings", [{"every": 0}, {"batch": 0}, {"threshold": 1.0}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|between"):
        AttentionMonitor(nn.Identity(), **settings)


# ------------------------------------------------------------------ probing


def test_a_probe_leaves_modes_and_random_numbers_alone() -> None:
    model = translator(dropout={"residual": 0.5}).train()
    model.encoder[0].eval()
    inputs, monitor = batch(), AttentionMonitor(model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    real = {"encoder": inputs[0] != 0, "decoder": inputs[1] != 0}
    found = monitor.probe(lambda: model(*inputs), step=70, real=real)
    assert torch.equal(torch.rand(4), expected)
    assert model.training and not model.encoder[0].training and model.encoder[1].training
    assert samples(monitor) == [70] * 6 and found == monitor.latest
    with capture(model.eval()) as calls, torch.no_grad():
        model(*inputs)
    cross = next(call for call in calls if call.name == "decoder.1.cross")
    given = {"scale": cross.scale, "mask": cross.mask, "queries": inputs[1] != 0}
    agree(found["decoder.1.cross"], direct(cross.q, cross.k, **given, raw_q=cross.raw_q, raw_k=cross.raw_k))


def test_compiled_models_are_probed() -> None:
    model = nn.Sequential(OwnAttention()).train()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 5, 8)
    with AttentionMonitor(compiled, every=1) as monitor:
        with pytest.warns(UserWarning, match=r"it is compiled; AttentionMonitor\.probe looks inside"):
            compiled(x)
        assert not monitor.latest and "compiled" in next(iter(monitor.unseen.values()))
        monitor.probe(lambda: compiled(x))
    assert list(monitor.latest) == ["0"] and not monitor.unseen
    ours = translator().train()
    assert not compiled_parts(ours)
    ours.compile_layers()
    assert compiled_parts(ours) == ["Translator"]
    monitor = AttentionMonitor(ours)
    monitor.probe(lambda: ours(*batch()))
    assert len(monitor.latest) == 6


def test_a_probe_runs_uncompiled_what_was_compiled_around_the_model() -> None:
    traced: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        traced.append(graph)
        return graph

    model = nn.Sequential(OwnAttention())
    compiled, monitor = torch.compile(model, backend=backend), AttentionMonitor(model)
    monitor.probe(lambda: compiled(torch.randn(2, 5, 8)))
    assert list(monitor.latest) == ["0"] and not monitor.unseen and not traced


# ------------------------------------------------------------------ in words


def test_the_table() -> None:
    model = translator()
    monitor = AttentionMonitor(model)
    monitor.probe(lambda: model(*batch()))
    lines = monitor.table().splitlines()
    assert lines[0].split()[:3] == ["attention", "largest", "logit"] and len(lines) == 7
    assert len({len(line) for line in lines}) == 1
    assert lines[4].startswith("decoder.0.cross")
    heads = monitor.table(heads=True).splitlines()
    assert len(heads) == 25 and heads[1].startswith("encoder.0.self head 1")
    assert not monitor.warnings()
