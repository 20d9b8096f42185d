"""What fused layers share: parameters side by side in one tensor, and the switch that is on for one forward pass.

All of it is off unless `use_fused` is entered; `layers.py` and `translator.py` are the plain reference.

A parameter's gradient comes to its place in `FlatParameters.gradients` in one of three ways: a backward adds it there
(`gradient_room`), a job beside the main stream does (`beside.py`), or autograd adds what a backward returned
(`hand_back`). Whoever adds on the main stream first lets pending jobs settle that add to the same place.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qknorm.attention.availability import HAS_KERNELS, INTERPRETED
from qknorm.attention.sharing import share
from qknorm.models.beside import Beside

ALIGNED = 64
"""Every parameter starts at a multiple of so many entries, since matrix units want aligned operands."""


class FlatParameters:
    """Parameters side by side in one float32 tensor, and beside it their gradients and a half-precision copy.

    Names, shapes and values of the parameters stay; they and their gradients become views. Any view of a parameter has
    its gradient and its copy at the same place of the other tensors. `add_beside` lets gradients add up beside the main
    stream; then whoever reads them calls `beside.join` first.
    """

    beside: Beside | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], half: torch.dtype | None = None) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        starts, end = [], 0
        for parameter in self.parameters:
            starts.append(end)
            end += -(-parameter.numel() // ALIGNED) * ALIGNED
        device = self.parameters[0].device
        self.values, self.gradients = (torch.zeros(end, device=device) for _ in range(2))
        self.halves = None if half is None else torch.zeros(end, device=device, dtype=half)
        self._slices = [slice(start, start + p.numel()) for start, p in zip(starts, self.parameters, strict=True)]
        for parameter, value, gradient in zip(
            self.parameters, self.views_of(self.values), self.views_of(self.gradients), strict=True
        ):
            value.copy_(parameter.detach())
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
            parameter.data, parameter.grad = value, gradient
        self._numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._seen = -1
        self.refresh()

    @staticmethod
    def refusal(parameters: Iterable[nn.Parameter]) -> str | None:
        """Why these cannot be laid side by side; None if they can."""
        kinds = {(p.dtype, p.device, hasattr(p, "full_tensor"), p.is_contiguous(), p.requires_grad) for p in parameters}
        if len(kinds) == 1:
            dtype, _, shared, contiguous, learns = kinds.pop()
            if dtype == torch.float32 and not shared and contiguous and learns:
                return None
        return "the parameters are not all float32, contiguous, whole, on one device and to be learned"

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A tensor of this layout, cut into the parameters' shapes."""
        return [flat[part].view(p.shape) for part, p in zip(self._slices, self.parameters, strict=True)]

    def span_of(self, parameters: Sequence[nn.Parameter]) -> slice:
        """From the first of these, which lie next to each other, to the end of the last."""
        numbers = [self._numbers[each] for each in parameters]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        last = self._slices[numbers[-1]].stop
        return slice(self._slices[numbers[0]].start, -(-last // ALIGNED) * ALIGNED)

    def gradient_of(self, weight: Tensor) -> Tensor | None:
        """Where gradients of a parameter, or of a view of one, add up; None for any other tensor."""
        return self._same_place(weight, self.gradients)

    def add_beside(self, beside: Beside) -> None:
        """Lets linear maps add their gradients there; what autograd adds by itself waits for them."""
        self.beside = beside
        for parameter, place in zip(self.parameters, self.views_of(self.gradients), strict=True):
            parameter.register_hook(functools.partial(_settle, beside, place))  # type: ignore[no-untyped-call]

    def half_of(self, weight: Tensor) -> Tensor | None:
        """The half-precision copy of a parameter, or of a view of one; None for any other tensor."""
        return None if self.halves is None else self._same_place(weight, self.halves)

    def refresh(self) -> None:
        """Brings the half-precision copy up to date."""
        if self.halves is not None:
            self.halves.copy_(self.values)
        self._seen = self._version()

    def refresh_if_written(self) -> None:
        """The same, where others have written to the parameters since, as a checkpoint does that is put back."""
        if self._version() != self._seen:
            self.refresh()

    def _version(self) -> int:
        return sum(parameter._version for parameter in self.parameters)

    def _same_place(self, weight: Tensor, flat: Tensor) -> Tensor | None:
        if weight.dtype != self.values.dtype or weight.untyped_storage().data_ptr() != self._address:
            return None
        return flat.as_strided(weight.shape, weight.stride(), weight.storage_offset())

    @property
    def _address(self) -> int:
        return self.values.untyped_storage().data_ptr()


@dataclass
class FusedRun:
    """One forward pass with fused parts: which of them, and the seed that all its dropout comes from."""

    seed: Tensor
    linear: bool = False
    layers: bool = False
    flat: FlatParameters | None = None
    sites: int = 0
    one: Tensor | None = None
    """A 1 that the loss is derived from: whoever gets this tensor for a gradient need not multiply by it."""
    bias_to_leave: Tensor | None = None
    """That the next linear map with it is not to add, and sets to None: whoever comes after adds it."""

    def next_site(self) -> int:
        """A number for each place that drops, in the order of computation."""
        self.sites += 1
        return self.sites

    def gradient_place(self, weight: Tensor) -> Tensor | None:
        """Where a backward may add the gradient of a parameter, or of a view of one, itself."""
        if self.flat is None or self.flat.gradient_of(weight) is None:
            return None
        return gradient_room(weight, self.flat)[0]


_RUN: ContextVar[FusedRun | None] = ContextVar("fused_run", default=None)


def _settle(beside: Beside, place: Tensor, gradient: Tensor | None) -> None:
    """Before autograd adds a gradient to a place; it comes here with none too, which is not added."""
    if gradient is not None:
        beside.settle(place)


@contextmanager
def use_fused(
    device: torch.device,
    *,
    linear: bool = False,
    layers: bool = False,
    flat: FlatParameters | None = None,
    seed: Tensor | None = None,
) -> Iterator[FusedRun | None]:
    """Within it, passes of models run through the fused parts asked for, where these apply.

    The seed, if none is given, is drawn on the device by PyTorch's generator, so that a recorded pass draws a new one
    at each replay; whoever evaluates gives one, which is not looked at. Without Triton, or on a device it cannot
    compile for, everything stays plain.
    """
    if not kernels_apply(device):
        yield None
        return
    from qknorm.models.fused_linear import fused_linears

    if seed is None:
        seed = torch.empty(1, dtype=torch.int64, device=device).random_()
    run = FusedRun(seed, linear, layers, flat)
    token = _RUN.set(run)
    try:
        with fused_linears(run) if linear else nullcontext(), share(run):
            yield run
    finally:
        _RUN.reset(token)


def current_run() -> FusedRun | None:
    """The pass with fused parts that is under way, if one is; none for torch.compile, which fuses by itself."""
    return None if torch.compiler.is_compiling() else _RUN.get()


def share_of(module: nn.Module, p: float) -> float:
    """What a module that drops a share `p` in training drops now."""
    return p if module.training else 0.0


def is_as_made(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these kinds and nothing was added, so that others may do its work uncalled."""
    added = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) in kinds and not added


def kernels_apply(device: torch.device) -> bool:
    """Whether Triton kernels can run there: on a GPU since Ampere, or anywhere in Triton's interpreter."""
    able = INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))
    return able and HAS_KERNELS


def compute_dtype(x: Tensor) -> torch.dtype:
    """What products with `x` are computed in: autocast's choice where it is on, or x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def in_dtype(weight: Tensor, dtype: torch.dtype, flat: FlatParameters | None) -> Tensor:
    """A weight in this dtype: from the copy that is kept, or by a cast."""
    if weight.dtype == dtype:
        return weight
    half = flat.half_of(weight) if flat is not None else None
    return half if half is not None and half.dtype == dtype else weight.to(dtype)


def whole(types: int) -> int:
    """Rows of a table of so many types: a multiple of 16, since matrix units and wide loads want whole groups."""
    return -(-types // 16) * 16


def gradient_room(weight: Tensor, flat: FlatParameters | None, *, beside: bool = False) -> tuple[Tensor, bool]:
    """Where to add the gradient of a weight in float32, and whether that is its final place.

    Not before all that was started beside the main stream has added to that place, unless the caller adds there too.
    """
    place = flat.gradient_of(weight) if flat is not None else None
    if flat is not None and place is not None:
        if flat.beside is not None and not beside:
            flat.beside.settle(place)
        return place, True
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device), False


def hand_back(weight: Tensor, room: tuple[Tensor, bool]) -> Tensor | None:
    """What a backward returns for a weight whose gradient was added to `room`: nothing, if it is in its place."""
    gradient, final = room
    return None if final else gradient.to(weight.dtype)
