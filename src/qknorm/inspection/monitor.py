"""What attention does in any model while it trains or runs: measures per head, now and then."""

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from qknorm.inspection.judgement import ANY_LENGTH, CURE, SLOWER, Sample, judge
from qknorm.inspection.measures import Measures
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.capture import WATCHING, Calls, capture, compiled_parts, watch
from qknorm.inspection.watching.tape import replaced

__all__ = ["AttentionMonitor", "Call", "Calls", "Sample", "capture", "judge"]

MOST_LOGITS = 1 << 24
"""Of one attention. Where sentences are so long that `batch` of them have more, fewer are measured, one at least."""

NOTHING_YET = (
    "nothing is measured yet: passes count in training mode, with gradients, and not inside a compiled model;"
    " monitor.probe(lambda: model(…)) measures at any time"
)
NONE_RAN = (
    "no attention ran in the pass that was watched; what can be seen is torch's, transformers', timm's and qknorm's"
    " attention, and whatever calls torch.nn.functional.scaled_dot_product_attention or qknorm.attend"
)


class AttentionMonitor:
    """Measures every attention of a model, at every `every`-th forward pass in training, from within a `with`.

    Outputs and gradients stay the same to the bit. It sees our attention, torch's (the fast path of nn.Transformer
    too), every Hugging Face transformers model that uses the library's attention interface, timm's attention, and
    whatever calls qknorm.attend or torch.nn.functional.scaled_dot_product_attention, in the model's own package under
    an imported name too; `unseen` says what it could not see and why. Since attention is found as it runs, a model in
    which none is seen gets a Python warning at the end of the first pass that is measured, and goes on. Of each batch
    the first `batch` sentences are measured. `threshold` is the weight from which on a query is saturated.
    """

    def __init__(self, model: nn.Module, *, every: int = 100, batch: int = 8, threshold: float = 0.99) -> None:
        if every < 1 or batch < 1:
            raise ValueError(f"every and batch must be at least 1, got {every} and {batch}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is a weight between 0 and 1, got {threshold}")
        self.model, self.every, self.batch, self.threshold = model, every, batch, threshold
        self.latest: dict[str, Measures] = {}
        """The measures taken last, by the name of the attention."""
        self.history: list[Sample] = []
        """All that was measured: (step, name, measures)."""
        self.unseen: dict[str, str] = {}
        """What looks like attention but could not be watched, by name, with the reason."""
        self._bounded: dict[str, bool] = {}
        self._longest = 0
        self._at = 0
        self._stepped_by_hand = False
        self._sampled_at: int | None = None
        self._has_watched = self._has_warned = False
        self._counted: _Counted | None = None

    # ------------------------------------------------------------------ in a training

    def __enter__(self) -> Self:
        if self._counted is not None:
            raise RuntimeError("this monitor watches already; leave its `with` first, or make another one")
        self._counted = _Counted(self)
        self.model.forward = self._counted
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            counted.leave()

    def step(self) -> None:
        """Says that a step of training has ended; from the first call on, these are counted and not forward passes."""
        if not self._stepped_by_hand:
            self._stepped_by_hand, self._at = True, 0
        self._at += 1

    def _begin_pass(self) -> bool:
        """Whether the forward pass that begins is one to measure."""
        if not self.model.training or not torch.is_grad_enabled():
            return False
        return self._at % self.every == 0 and self._sampled_at != self._at and not _is_recorded()

    def _end_pass(self, sampled_at: int | None) -> None:
        if sampled_at is not None:
            self._sampled_at = sampled_at
        if self.model.training and torch.is_grad_enabled() and not self._stepped_by_hand:
            self._at += 1

    # ------------------------------------------------------------------ at any time

    def probe(
        self, run: Callable[[], object], *, step: int | None = None, real: Mapping[str, Tensor] | None = None
    ) -> dict[str, Measures]:
        """Measures all attentions in a pass of its own: `run` calls the model, which is in eval mode meanwhile.

        It sees inside compiled models too, since they run uncompiled within, and leaves random numbers as they were.
        `real` tells which queries (b, t) are no padding, for attentions whose names begin with its keys.
        """
        with _apart(self.model), self._sampling(self._at if step is None else step, real or {}, eager=True):
            run()
        return self.latest

    @contextmanager
    def _sampling(self, step: int, real: Mapping[str, Tensor], *, eager: bool = False) -> Iterator[None]:
        found: dict[str, Measures] = {}

        def on_call(call: Call) -> None:
            name, number = call.name, 2
            while name in found:  # a module that attends more than once in a pass, such as a shared layer
                name, number = f"{call.name}#{number}", number + 1
            found[name] = call.measure(self.threshold)
            self._bounded[name] = call.bounded
            self._longest = max(self._longest, call.k.shape[2])

        def tell(call: Call) -> None:
            on_call(_with_queries(call, real))

        with watch(self.model, tell, self._sentences, eager=eager) as tape:
            yield
        seen = {*found, *(compiled_parts(self.model) if eager else ())}
        self.unseen = {name: reason for name, reason in self.unseen.items() if name not in seen} | tape.unseen
        self.latest = _to_cpu(found)
        self.history.extend(Sample(step, name, measures) for name, measures in self.latest.items())
        self._has_watched = True
        if not found and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._why_nothing(), stacklevel=3)

    def _why_nothing(self) -> str:
        reason = NONE_RAN
        if self.unseen:
            (name, why), more = next(iter(self.unseen.items())), len(self.unseen) - 1
            others = f", and {more} more in monitor.unseen" if more else ""
            reason = f"attentions that could not be watched: {name} ({why}){others}"
        return f"AttentionMonitor records nothing of {type(self.model).__name__}: {reason}"

    def _sentences(self, call: Call) -> int:
        return min(self.batch, max(1, MOST_LOGITS // call.logits))

    # ------------------------------------------------------------------ in words

    def table(self, *, heads: bool = False) -> str:
        """The latest measures as lines of text: one for every attention, or for every head."""
        if not self.latest:
            if self.unseen:
                return "no attention could be seen; monitor.unseen says why"
            return NONE_RAN if self._has_watched else NOTHING_YET
        names = ("largest_logit", "logit_std", "relative_entropy", "saturation", "effective_keys", "q_norm", "k_norm")
        rows = [("attention", *(name.replace("_", " ") for name in names))]
        for name, measures in self.latest.items():
            lines: list[dict[str, Any]] = measures.as_rows(name) if heads else [{"name": name, **measures.mean()}]
            for line in lines:
                title = f"{name} head {line['head'] + 1}" if heads else name
                rows.append((title, *(f"{line[each]:.3g}" for each in names)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )

    def warnings(self) -> list[str]:
        """What there is to worry about in the history, in words."""
        return judge(self.history, self._cure)

    def _cure(self, name: str) -> str:
        """What helps one attention: those that have bounded logits already, as it was last seen, need no more."""
        if self._bounded.get(name, False):
            return SLOWER
        return CURE.format(self._longest) if self._longest > 1 else ANY_LENGTH


class _Counted:
    """Stands for the model's forward. A copy of the model, deep or pickled, has its own forward again."""

    def __init__(self, monitor: AttentionMonitor) -> None:
        self._before = vars(monitor.model).get("forward")
        self._monitor, self._forward = monitor, monitor.model.forward
        functools.update_wrapper(self, self._forward, updated=())

    def leave(self) -> None:
        """Makes the model's forward what it was; where somebody else stands over it, it merely does nothing more."""
        if vars(self._monitor.model).get("forward") is not self:
            return
        before = self._before
        while isinstance(before, _Counted) and before._monitor._counted is not before:
            before = before._before  # a monitor that this one stood over, left in the meantime
        if before is None:
            del self._monitor.model.forward
        else:
            self._monitor.model.forward = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        monitor = self._monitor
        if torch.compiler.is_compiling() or monitor._counted is not self:
            return self._forward(*args, **kwargs)
        # no training waits for another thread that is watching: the pass is not measured then
        if not monitor._begin_pass() or not WATCHING.acquire(blocking=False):
            output = self._forward(*args, **kwargs)
            monitor._end_pass(None)
            return output
        at = monitor._at
        try:
            with replaced(monitor.model, "forward", self._forward), monitor._sampling(at, {}):
                output = monitor.model.forward(*args, **kwargs)
        finally:
            WATCHING.release()
        monitor._end_pass(at)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._monitor.model, "forward")


@contextmanager
def _apart(model: nn.Module) -> Iterator[None]:
    """Within it, the model runs as it is written, in eval mode and without gradients; then all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices, key=str)))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _with_queries(call: Call, real: Mapping[str, Tensor]) -> Call:
    """What is known of padding joined with what was found out: by the longest beginning of the name."""
    known = max((name for name in real if call.name.startswith(name)), key=len, default=None)
    if known is None:
        return call
    queries = real[known][: len(call.q)].to(call.q.device)
    return dataclasses.replace(call, queries=queries if call.queries is None else queries & call.queries)


def _to_cpu(measured: dict[str, Measures]) -> dict[str, Measures]:
    """All of it by one transfer, where it is in one place."""
    stacks = {name: measures.stack() for name, measures in measured.items()}
    if len({(stack.device, stack.dtype) for stack in stacks.values()}) != 1:
        return {name: measures.cpu() for name, measures in measured.items()}
    together = torch.cat(list(stacks.values()), dim=1).cpu()
    parts = torch.split(together, [stack.shape[1] for stack in stacks.values()], dim=1)
    return {name: Measures.from_stack(part) for name, part in zip(stacks, parts, strict=True)}


def _is_recorded() -> bool:
    """Whether a CUDA graph is being recorded, which would keep what is measured for ever."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
