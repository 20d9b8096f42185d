"""One training on several processes that torchrun started: who leads, how the model is spread and gathered again."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qknorm.errors import InputError


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
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {kind} was asked for, but PyTorch sees no GPU; use --device cpu")
    if size == 1:
        return Team(0, 1, torch.device(kind))
    place = torch.device("cuda", local) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return Team(rank, size, place)


_TORCHRUN = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def leave_team() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(model: nn.Module, team: Team, how: str) -> nn.Module:
    """The model as a team trains it: whole on every process (ddp), or in shares (fsdp)."""
    if team.size == 1:
        return model
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for layer in [*model.encoder, *model.decoder]:  # type: ignore[misc]
            fully_shard(layer)
        fully_shard(model)
        for name in ("encode", "decode", "score"):
            register_fsdp_forward_method(model, name)
        return model
    return nn.parallel.DistributedDataParallel(model, device_ids=[team.device] if team.device.type == "cuda" else None)


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on the CPU, whatever the spread; every process must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if not dist.is_initialized():
        return {name: value.detach().cpu() for name, value in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def restore_model(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts back what `gather_model` gave."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not dist.is_initialized():
        model.load_state_dict(dict(weights))
    else:
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments on the CPU, named `moment.PARAMETER.KIND`; every process must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer, options=options)["state"])
    return {
        f"moment.{name}.{kind}": value.detach().cpu()
        for name, moments in state.items()
        for kind, value in moments.items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `gather_optimizer` gave."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)
    state: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("moment."):
            parameter, _, kind = name.removeprefix("moment.").rpartition(".")
            state.setdefault(parameter, {})[kind] = value
    whole["state"] = cast(Any, state)
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
