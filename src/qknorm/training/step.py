"""One step of training: forward, backward, clip, update. On a GPU each shape of batch is recorded once and replayed."""

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qknorm.attention.availability import HAS_TRITON
from qknorm.config import Optimisation
from qknorm.specials import END
from qknorm.training.fast import Fast, FastStep
from qknorm.training.memory import keep_freed_memory
from qknorm.training.objective import Losses

WIDTH_FOR_BFLOAT16 = 256

BatchTensors = tuple[Tensor, ...]  # what the model reads, then what it should say


class Objective(NamedTuple):
    """The loss of logits and targets, and what else it takes."""

    function: Callable[..., Losses]
    arguments: tuple[Any, ...] = ()


class Sums(NamedTuple):
    """What was gathered since the last reading."""

    smoothed: float
    plain: float
    tokens: int
    steps: int
    bad_steps: int


class TrainingStep:
    """Runs steps on batches of ids and keeps running sums of the loss on the device, so that no step waits for it.

    A step whose gradients are not finite changes nothing but a count. `fast` names parts that run by fused kernels,
    none if not given; where they do not apply the plain ones run.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        settings: Optimisation,
        device: torch.device,
        objective: Objective,
        fast: Fast | None = None,
    ) -> None:
        self.model, self._inner, self._settings, self.device = model, inner, settings, device
        self.precision = choose_precision(settings, device, inner.settings.width)  # type: ignore[union-attr, arg-type]
        cuda = device.type == "cuda"
        if device.type == "cpu":
            keep_freed_memory()
        self.learning_rate = torch.zeros((), device=device) if cuda else 0.0
        self.optimizer = torch.optim.AdamW(
            _decay_groups(model) if settings.decay_matrices_only else _learning(model),
            lr=self.learning_rate if cuda else 1.0,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=cuda,
        )
        # a fused optimiser leaves everything as it is where this is 1
        self._found_bad = torch.zeros((), device=device)
        self.optimizer.found_inf = self._found_bad  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._weight = torch.zeros((), device=device)
        alone = model is inner and not hasattr(next(model.parameters()), "full_tensor")  # nor a share of a model
        self._recorded = Recordings(device) if cuda and alone else None
        self._loss, self._loss_arguments = objective
        fast = fast if fast is not None and alone and FastStep.applies(inner, fast) else Fast()
        if choose_compile(settings, device) and settings.parallel != "fsdp" and not fast.model:
            inner.compile_layers()  # type: ignore[operator]
            self._loss = torch.compile(self._loss, dynamic=True)
        for parameter in _learning(model):
            parameter.grad = torch.zeros_like(parameter)
        self._make_moments()
        self._fast = FastStep(inner, fast, self.precision, self.optimizer, settings.clip, self.sums)

    def __call__(self, batches: Sequence[BatchTensors], tokens: int, learning_rate: float, team_size: int = 1) -> None:
        """One update from these batches, whose losses are averaged over `tokens`, those of other processes included."""
        self._set_learning_rate(learning_rate)
        self._fast.begin(learning_rate)
        self._weight.fill_(team_size / tokens)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if self._recorded is not None and (number == 0 or self._recorded.has("batch", batch)):
                if not self._recorded.has("batch", batch):
                    self._record(batch)
                self._recorded.run("batch", batch)
            else:
                with nullcontext() if last or self.model is self._inner else _no_sync(self.model):
                    self._forward_backward(*batch)
        if self._recorded is not None:
            if not self._recorded.has("update", ()):
                self._recorded.record("update", self._update, ())
            self._recorded.run("update", ())
        else:
            self._update()

    def _forward_backward(self, *batch: Tensor) -> None:
        *inputs, targets = batch
        with self.autocast():
            if self._fast.fast.model:
                loss, losses = self._fast.losses(batch, self._weight, (self._loss, *self._loss_arguments))
            else:
                losses = self._loss(self.model(*inputs), targets, *self._loss_arguments)
                loss = losses.smoothed * self._weight
        try:
            torch.autograd.backward(loss, self._fast.one)
        finally:
            self._fast.join()
        with torch.no_grad():
            self.sums[:3].add_(torch.stack([losses.smoothed, losses.plain, losses.tokens.float()]))

    def prepare(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Records all these shapes of batches before the first step, so that none waits for it; only on a GPU."""
        if self._recorded is not None:
            for shape in shapes:
                ends = torch.full(shape, END, device=self.device)
                self._record((ends, ends, ends))

    def _record(self, batch: BatchTensors) -> None:
        """Runs a batch once unrecorded, since kernels are made ready in their first call, and wipes its traces.

        So it must be the first of a step. What that step draws is the same as if the shape had been recorded before.
        """
        assert self._recorded is not None
        sums, seed = self.sums.clone(), torch.cuda.initial_seed()
        self._recorded.warm_up(lambda: self._forward_backward(*batch))
        self.optimizer.zero_grad(set_to_none=False)
        self._recorded.record("batch", self._forward_backward, batch)
        self.sums.copy_(sums)
        torch.cuda.manual_seed(seed)

    def _update(self) -> None:
        if self._fast.update is not None:
            self._fast.update()
            return
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._found_bad.copy_((~norm.isfinite()).float())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if self._fast.flat is not None:
            self._fast.flat.refresh()
        self.sums[3] += 1
        self.sums[4] += self._found_bad

    def _make_moments(self) -> None:
        """Lets the optimiser set itself up, by a step that changes nothing: a recording must not do that."""
        self._found_bad.fill_(1.0)
        self.optimizer.step()
        self._found_bad.zero_()

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self.precision == torch.float32:
            return nullcontext()
        # the cache of cast weights must not outlive a recording
        return torch.autocast(self.device.type, dtype=self.precision, cache_enabled=self._recorded is None)

    def read_sums(self) -> Sums:
        """What has been gathered since the last call; waits for the device."""
        smoothed, plain, tokens, steps, bad = self.sums.tolist()
        self.sums.zero_()
        return Sums(smoothed, plain, int(tokens), int(steps), int(bad))

    def _set_learning_rate(self, rate: float) -> None:
        if isinstance(self.learning_rate, Tensor):
            self.learning_rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate


class Recordings:
    """CUDA graphs by name and shape of input."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None
        # of high priority, so that what a job starts beside itself takes only what it leaves of the device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def has(self, name: str, inputs: tuple[Tensor, ...]) -> bool:
        """Whether inputs of this shape can be run."""
        return _key(name, inputs) in self._graphs

    def warm_up(self, job: Callable[[], None]) -> None:
        """Runs `job` beside the main stream, as it will be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # the backward pass has a thread of its own, whose first matrix product finds no context and says so
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            job()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def record(self, name: str, job: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """Records `job` for inputs of this shape; nothing is computed."""
        held = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # a thread that writes a checkpoint may go on meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            job(*held)
        self._graphs[_key(name, inputs)] = graph, held

    def run(self, name: str, inputs: tuple[Tensor, ...]) -> None:
        """Copies the inputs to where the recording of their shape reads them, and replays it."""
        graph, held = self._graphs[_key(name, inputs)]
        for slot, given in zip(held, inputs, strict=True):
            slot.copy_(given, non_blocking=True)
        graph.replay()


def _key(name: str, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return name, *(tuple(x.shape) for x in inputs)


def choose_compile(settings: Optimisation, device: torch.device) -> bool:
    """Whether layers are compiled: as the settings say, or on a GPU where compilers are at hand."""
    if settings.compile is not None:
        return settings.compile
    tools = HAS_TRITON and any(map(shutil.which, ("cc", "gcc", "clang")))
    return device.type == "cuda" and tools


def choose_precision(settings: Optimisation, device: torch.device, width: int) -> torch.dtype:
    """What forward passes compute in; on the CPU, where casting costs, bfloat16 pays for wide models alone."""
    if settings.precision != "auto":
        return torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
    if device.type == "cuda":
        good = torch.cuda.is_bf16_supported()
    else:
        good = device.type == "cpu" and width >= WIDTH_FOR_BFLOAT16 and _cpu_multiplies_bfloat16()
    return torch.bfloat16 if good else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it; without them it is slower than float32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def _learning(model: nn.Module) -> list[nn.Parameter]:
    """Its parameters but for those that are frozen, which weight decay must not touch either."""
    return [each for each in model.parameters() if each.requires_grad]


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters in two groups: matrices, and those that weight decay leaves alone."""
    parameters = _learning(model)
    return [
        {"params": [each for each in parameters if each.dim() >= 2]},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]


def _no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """Keeps gradients to this process until the last batch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    return nullcontext()
