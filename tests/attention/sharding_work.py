"""What two processes do with one adopted model, by torchrun: FSDP of both kinds computes and learns what one does."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qknorm.attention import MultiheadAttention
from qknorm.attention.adopt import adopt

WHOLE = StateDictOptions(full_state_dict=True)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def share_out(model: nn.TransformerEncoder) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap(model: nn.TransformerEncoder) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def step(model: nn.Module, x: Tensor) -> Tensor:
    """A step of plain gradient descent on the mean over what it is given."""
    output: Tensor = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output.sin().mean().backward()
    optimizer.step()
    return output.detach()


def compare(spread: nn.Module, alone: nn.Module, x: Tensor) -> None:
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    torch.testing.assert_close(step(spread, x[mine]), step(alone, x)[mine], rtol=1e-5, atol=1e-6)
    state, expected = get_model_state_dict(spread, options=WHOLE), alone.state_dict()
    if dist.get_rank() == 0:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        again = encoder()
        assert all(each.norm.p == 3.0 for each in adopt(again, state=state).changed)
        again.load_state_dict(state)
        torch.testing.assert_close(again(x), alone(x), rtol=1e-4, atol=1e-5)


def adopt_in_parallel(x: Tensor) -> None:
    """A model whose weights are split within its layers can be adopted afterwards too."""
    model, alone = encoder(), encoder()
    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    assert isinstance(model.layers[0].linear1.weight, DTensor)
    for each in (model, alone):
        assert len(adopt(each, length=8, p=3.0).changed) == 2
    torch.testing.assert_close(model(x), alone(x), rtol=1e-5, atol=1e-6)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    for spread in (share_out, wrap):
        model = encoder()
        adoption = adopt(model, length=8, p=3.0)
        alone, starts = copy.deepcopy(model), [each.start for each in adoption.changed]
        compare(spread(model), alone, x)
        assert all(not math.isclose(float(layer.self_attn.norm.scale.detach()), start)
                   for layer, start in zip(alone.layers, starts, strict=True))  # fmt: skip
    assert fully_shard(MultiheadAttention(16, 4), mesh=init_device_mesh("cpu", (2,))) is not None
    with pytest.raises(ValueError, match="adopt before the model is shared out"):
        adopt(share_out(encoder()), length=8)
    adopt_in_parallel(x)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
