"""One training on several processes that torchrun started: who leads, how the model is spread and gathered again."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.models.translator import Translator

OLDEST_WITH_FSDP = "2.9"
"""Earlier ones cannot put shares back, or on the CPU add gradients up wrongly."""


@dataclass(frozen=True)
class Team:
    """The processes of a run; alone, a team of one."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.size > 1:
            dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Whether any process says yes; the same answer for all."""
        if self.size == 1:
            return flag
        vote = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return bool(vote.item())

    def pool(self, sums: Tensor) -> None:
        """Leaves the sum over all processes with the leading one, and zeros with the others."""
        if self.size == 1:
            return
        dist.all_reduce(sums)
        if not self.leads:
            sums.zero_()

    def lead(self, job: Callable[[], object]) -> None:
        """The leading process does a job that the others wait for; where it fails, it fails for all."""
        failure: InputError | None = None
        if self.leads:
            try:
                job()
            except InputError as error:
                failure = error
        told = self.share(failure and str(failure))
        if told is not None:
            raise failure or InputError(told)

    def share(self, value: Any) -> Any:
        """What the leading process has, for all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def join_team(device: str | None = None) -> Team:
    """Joins the processes that torchrun started, or stands alone; picks a GPU where there is one."""
    size, rank, local = (int(os.environ.get(name, default)) for name, default in _TORCHRUN)
    place = choose_device(device)
    if size == 1:
        return Team(0, 1, place)
    if place.type == "cuda":
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return Team(rank, size, place)


def choose_device(name: str | None) -> torch.device:
    """The device of this name; a GPU where there is one if none is named."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise InputError(f"--device {name} is no device; use cpu or cuda, or cuda:1 for the second GPU")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise InputError(f"--device {name} was asked for, but PyTorch sees {seen} GPU; use --device cpu")
    return torch.device(name)


_TORCHRUN = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def leave_team() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class SpreadModel:
    """A model as a team trains it: `module` is what steps call, `inner` the model itself.

    Weights and moments come out whole and go in whole, whatever the spread; every process must call for them.
    """

    module: nn.Module
    inner: Translator | LanguageModel
    numbers: frozenset[str] = frozenset()
    """Parameters that are single numbers, which fsdp can only hold as vectors of one."""

    def weights(self, *, stay: bool = False) -> dict[str, Tensor]:
        """All weights, on the CPU, or as copies that `stay` on their device."""
        return {name: self._whole(name, value, stay) for name, value in self.inner.state_dict().items()}

    def moments(self, optimizer: torch.optim.Optimizer, *, stay: bool = False) -> dict[str, Tensor]:
        """What the optimiser remembers, in the same way, named `moment.PARAMETER.KIND`."""
        return {
            f"moment.{name}.{kind}": self._whole(name, value, stay)
            for name, parameter in self.inner.named_parameters()
            for kind, value in optimizer.state[parameter].items()
        }

    def restore(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Puts back, in place, what `weights` and `moments` gave; refuses those of a model of another make."""
        held = self.inner.state_dict()
        # checkpoints from before a fixed p was saved lack it; the settings have it
        weights = {name: value for name, value in held.items() if name.endswith(".p_fixed")} | dict(weights)
        misfit = _find_misfit(weights, held)
        if misfit:
            raise InputError(f"the checkpoint does not fit the model: {misfit}; undo what was changed in its settings")
        for name, slot in held.items():
            _put(slot, weights[name])
        for name, parameter in self.inner.named_parameters():
            for kind, slot in optimizer.state[parameter].items():
                _put(slot, moments[f"moment.{name}.{kind}"])

    def scales(self) -> dict[str, float]:
        """The scale g of every attention, by name, as the model itself tells them when it is in one piece."""
        named = {name: each.norm for name, each in self.inner.attentions().items() if each.norm.kind != "none"}
        return {name: float(_gather(norm.scale).detach().float().mean()) for name, norm in named.items()}

    def _whole(self, name: str, value: Tensor, stay: bool) -> Tensor:
        whole = _gather(value)
        whole = (whole.reshape(()) if name in self.numbers else whole).detach()
        return whole.clone() if stay else whole.cpu()


def _find_misfit(weights: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> str | None:
    """What first tells saved weights from those of the model; a single number may have any shape."""
    for name, slot in held.items():
        if name not in weights:
            return f"it has no {name}, which the settings ask for"
        if weights[name].numel() != slot.numel():
            return f"its {name} has shape {tuple(weights[name].shape)} where the settings give {tuple(slot.shape)}"
    return next((f"it has {name}, which the settings leave out" for name in weights if name not in held), None)


def spread(model: Translator | LanguageModel, team: Team, how: str) -> SpreadModel:
    """The model as a team trains it: whole on every process (ddp), or in shares (fsdp)."""
    if team.size == 1:
        return SpreadModel(model, model)
    if how == "fsdp":
        if torch.__version__ < OLDEST_WITH_FSDP:
            raise InputError(
                f"training.parallel fsdp needs PyTorch {OLDEST_WITH_FSDP} or newer, and this is {torch.__version__}; "
                f"give ddp"
            )
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        numbers = _turn_numbers_into_vectors(model)
        for stack in model.children():
            for layer in stack if isinstance(stack, nn.ModuleList) else ():
                fully_shard(layer)
        fully_shard(model)
        for name in ("encode", "decode", "score") if isinstance(model, Translator) else ():
            register_fsdp_forward_method(model, name)
        return SpreadModel(model, model, numbers)
    devices = [team.device] if team.device.type == "cuda" else None
    return SpreadModel(nn.parallel.DistributedDataParallel(model, device_ids=devices), model)


def _turn_numbers_into_vectors(model: nn.Module) -> frozenset[str]:
    """Gives parameters of no dimension one, which broadcasts the same; returns their names."""
    numbers = frozenset(name for name, parameter in model.named_parameters() if parameter.dim() == 0)
    for name in numbers:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, own, nn.Parameter(getattr(module, own).detach().reshape(1)))
    return numbers


def _gather(value: Tensor) -> Tensor:
    """A tensor in one piece, of whose shares every process has one."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _put(held: Any, whole: Tensor) -> None:
    """Copies a whole tensor, or this process's share of it, to where it is held."""
    shaped = whole.reshape(held.shape).to(held.device)
    with torch.no_grad():
        if hasattr(held, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            share = distribute_tensor(shaped, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(share.to_local())
        else:
            held.copy_(shaped)
