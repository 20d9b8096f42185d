"""Layers in few passes over memory: residual, dropout and norm as one; bias, activation and dropout; word vectors.

`layers.py` is the plain reference. Gradients of parameters are added straight to where a `FlatParameters` keeps them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qknorm.models.fused_run import (
    FlatParameters,
    FusedRun,
    compute_dtype,
    gradient_room,
    hand_back,
    is_as_made,
    share_of,
)
from qknorm.models.launches import LAUNCHES

WIDEST = 4_096
TINY = torch.finfo(torch.float32).tiny


class Drop(NamedTuple):
    """How one place of the model drops: its share in 65,536ths, and where its random bits come from."""

    seed: Tensor
    site: int
    dropped: int

    @classmethod
    def of(cls, run: FusedRun, share: float) -> "Drop":
        """A share that is a multiple of 1/65,536, as in `attention.dropout`."""
        return cls(run.seed, run.next_site(), min(65_535, round(share * 65_536)))

    @property
    def scale_up(self) -> float:
        """By which what stays is multiplied."""
        return 65_536 / (65_536 - self.dropped)


class Part(NamedTuple):
    """A sublayer, the `Residual` around it, and the bias that its last linear map adds."""

    around: nn.Module
    sublayer: Callable[[Tensor], Tensor]
    bias: Tensor | None


class _AddNorm(torch.autograd.Function):
    """(x, y) ↦ x + dropout(y + its bias) and the norm of that; without y, the norm of x alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kind: int,
        eps: float,
        drop: Drop,
        dtype: torch.dtype,
        flat: FlatParameters | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from qknorm.models.fused_kernels import add_norm_forward

        x, y = x.contiguous(), None if y is None else y.contiguous()
        count, d = x.numel() // x.shape[-1], x.shape[-1]
        total = x if y is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        mean, inverse = torch.empty(2, count, dtype=torch.float32, device=x.device)
        grid, tile = LAUNCHES["add_norm_forward"].over_rows(count, d)
        add_norm_forward[grid](
            x, x if y is None else y, weight if y_bias is None else y_bias, total, out, mean, inverse, weight,
            weight if bias is None else bias, drop.seed, drop.site, drop.dropped, drop.scale_up, count, eps,
            HAS_Y=y is not None, HAS_Y_BIAS=y_bias is not None, DROPS=drop.dropped > 0, KIND=kind,
            HAS_BIAS=bias is not None, **tile,
        )  # fmt: skip
        ctx.save_for_backward(total, mean, inverse, weight, bias, y_bias)
        ctx.kind, ctx.drop, ctx.flat, ctx.y_dtype = kind, drop, flat, None if y is None else y.dtype
        ctx.set_materialize_grads(False)
        return out if y is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        from qknorm.models.fused_kernels import add_norm_backward

        total, mean, inverse, weight, bias, y_bias = ctx.saved_tensors
        drop, has_y = ctx.drop, ctx.y_dtype is not None
        to_sum, to_out = given if has_y else (None, *given)
        to_out = torch.zeros_like(total) if to_out is None else to_out.contiguous()
        to_sum = None if to_sum is None else to_sum.contiguous()
        to_x = torch.empty_like(total)
        to_y = torch.empty_like(total, dtype=ctx.y_dtype) if has_y else to_x
        rooms = [None if each is None else gradient_room(each, ctx.flat) for each in (y_bias, weight, bias)]
        assert rooms[1] is not None
        to_y_bias, to_weight, to_bias = ((room or rooms[1])[0] for room in rooms)
        count, d = total.numel() // total.shape[-1], total.shape[-1]
        grid, tile = LAUNCHES["add_norm_backward"].over_rows(count, d)
        add_norm_backward[grid](
            total, to_x if to_sum is None else to_sum, to_out, mean, inverse, weight, to_x, to_y, to_y_bias, to_weight,
            to_bias, drop.seed, drop.site, drop.dropped, drop.scale_up, count, HAS_Y=has_y,
            HAS_Y_BIAS=y_bias is not None, DROPS=drop.dropped > 0, HAS_SUM=to_sum is not None, KIND=ctx.kind,
            HAS_BIAS=bias is not None, STAGES=LAUNCHES["add_norm_backward"].stages_of_rows(d), **tile,
        )  # fmt: skip
        to_parameters = [
            None if each is None or room is None else hand_back(each, room)
            for each, room in zip((y_bias, weight, bias), rooms, strict=True)
        ]
        return to_x, to_y if has_y else None, *to_parameters, None, None, None, None, None


def _activate(z: Tensor, bias: Tensor | None, drop: Drop, *, gelu: bool) -> tuple[Tensor, Tensor]:
    """z as the kernel read it, and dropout(gelu or relu of z + bias)."""
    from qknorm.models.fused_kernels import activation_forward

    z = z.contiguous()
    count, d = z.numel() // z.shape[-1], z.shape[-1]
    out = torch.empty_like(z)
    grid, tile = LAUNCHES["activation_forward"].over_columns(count, d)
    activation_forward[grid](
        z, z if bias is None else bias, out, drop.seed, drop.site, drop.dropped, drop.scale_up, count, d,
        GELU=gelu, HAS_BIAS=bias is not None, DROPS=drop.dropped > 0, **tile,
    )  # fmt: skip
    return z, out


class _BiasReluDropout(torch.autograd.Function):
    """z ↦ dropout(relu(z + bias)); the backward sees in the result what was dropped."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, drop: Drop, flat: FlatParameters | None) -> Tensor:
        _, out = _activate(z, bias, drop, gelu=False)
        ctx.save_for_backward(out, bias)
        ctx.scale_up, ctx.flat = drop.scale_up, flat
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from qknorm.models.fused_kernels import relu_backward

        out, bias = ctx.saved_tensors
        room = None if bias is None else gradient_room(bias, ctx.flat)
        to_z, to_out = torch.empty_like(out), to_out.contiguous()
        count, d = out.numel() // out.shape[-1], out.shape[-1]
        grid, tile = LAUNCHES["relu_backward"].over_columns(count, d)
        relu_backward[grid](
            out, to_out, to_z, to_z if room is None else room[0], ctx.scale_up, count, d,
            HAS_BIAS=room is not None, **tile,
        )  # fmt: skip
        return to_z, None if room is None else hand_back(bias, room), None, None


class _BiasGeluDropout(torch.autograd.Function):
    """z ↦ dropout(gelu(z + bias)); what was dropped is drawn again in the backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, drop: Drop, flat: FlatParameters | None) -> Tensor:
        z, out = _activate(z, bias, drop, gelu=True)
        ctx.save_for_backward(z, bias)
        ctx.drop, ctx.flat = drop, flat
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from qknorm.models.fused_kernels import gelu_backward

        (z, bias), drop = ctx.saved_tensors, ctx.drop
        room = None if bias is None else gradient_room(bias, ctx.flat)
        to_z, to_out = torch.empty_like(z), to_out.contiguous()
        count, d = z.numel() // z.shape[-1], z.shape[-1]
        grid, tile = LAUNCHES["gelu_backward"].over_columns(count, d)
        gelu_backward[grid](
            z, z if bias is None else bias, to_out, to_z, to_z if room is None else room[0], drop.seed, drop.site,
            drop.dropped, drop.scale_up, count, d, HAS_BIAS=room is not None, DROPS=drop.dropped > 0, **tile,
        )  # fmt: skip
        return to_z, None if room is None else hand_back(bias, room), None, None


class _Embed(torch.autograd.Function):
    """ids ↦ dropout(factor · their rows, of unit length with FixNorm, + the language's vector + positions)."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        table: Tensor,
        language: Tensor | None,
        positions: Tensor | None,
        factor: float,
        fixnorm: bool,
        drop: Drop,
        flat: FlatParameters | None,
    ) -> Tensor:
        from qknorm.models.fused_kernels import embed_forward

        ids = ids.contiguous()
        count, d = ids.numel(), table.shape[1]
        length = ids.shape[-1] if positions is None else len(positions)
        out = torch.empty(*ids.shape, d, dtype=torch.float32, device=ids.device)
        grid, tile = LAUNCHES["embed_forward"].over_rows(count, d)
        embed_forward[grid](
            ids, table, table if language is None else language, table if positions is None else positions.contiguous(),
            out, drop.seed, drop.site, drop.dropped, drop.scale_up, factor, count, length, FIXNORM=fixnorm,
            HAS_LANGUAGE=language is not None, HAS_POSITIONS=positions is not None, DROPS=drop.dropped > 0, **tile,
        )  # fmt: skip
        learned = positions if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(ids, table, language, learned)
        ctx.factor, ctx.fixnorm, ctx.drop, ctx.flat = factor, fixnorm, drop, flat
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from qknorm.models.fused_kernels import embed_backward

        ids, table, language, positions = ctx.saved_tensors
        drop = ctx.drop
        room = gradient_room(table, ctx.flat)
        language_room = None if language is None else gradient_room(language, ctx.flat)
        positions_room = None if positions is None else gradient_room(positions, ctx.flat)
        grid, tile = LAUNCHES["embed_backward"].over_rows(ids.numel(), table.shape[1])
        embed_backward[grid](
            ids, table, to_out.contiguous(), room[0], (language_room or room)[0], (positions_room or room)[0],
            drop.seed, drop.site, drop.dropped, drop.scale_up, ctx.factor, ids.numel(), ids.shape[-1],
            FIXNORM=ctx.fixnorm, HAS_LANGUAGE=language is not None, LEARNS_POSITIONS=positions is not None,
            DROPS=drop.dropped > 0, **tile,
        )  # fmt: skip
        to_language = None if language_room is None else hand_back(language, language_room)
        to_positions = None if positions_room is None else hand_back(positions, positions_room)
        return None, hand_back(table, room), to_language, to_positions, None, None, None, None


class _UnitRows(torch.autograd.Function):
    """A table's rows as unit vectors in another dtype, with rows of zeros added at its end."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, padded: int, dtype: torch.dtype, flat: FlatParameters | None) -> Tensor:
        from qknorm.models.fused_kernels import unit_rows_forward

        table = table.contiguous()
        count, d = table.shape
        out = torch.empty(padded, d, dtype=dtype, device=table.device)
        grid, tile = LAUNCHES["unit_rows"].over_rows(padded, d)
        unit_rows_forward[grid](table, out, count, padded, **tile)
        ctx.save_for_backward(table)
        ctx.flat = flat
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        from qknorm.models.fused_kernels import unit_rows_backward

        (table,) = ctx.saved_tensors
        room = gradient_room(table, ctx.flat)
        count, d = table.shape
        grid, tile = LAUNCHES["unit_rows"].over_rows(count, d)
        unit_rows_backward[grid](table, to_out.contiguous(), room[0], count, **tile)
        return hand_back(table, room), None, None, None


def add_norm(
    run: FusedRun, x: Tensor, y: Tensor | None, share: float, norm: nn.Module, y_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + dropout(y + its bias), or x where there is no y, and its norm in the dtype that products are computed in."""
    from qknorm.models.fused_kernels import LAYER, RMS, SCALE

    weight: Tensor
    bias: Tensor | None = None
    if isinstance(norm, nn.LayerNorm):
        kind, eps, weight, bias = LAYER, norm.eps, norm.weight, norm.bias
    elif isinstance(norm, nn.RMSNorm):
        kind, eps, weight = RMS, norm.eps or torch.finfo(x.dtype).eps, norm.weight
    else:
        kind, eps, weight = SCALE, TINY, norm.scale  # type: ignore[assignment]
    drop = Drop.of(run, share if y is not None else 0.0)
    found = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, y, y_bias, weight, bias, kind, eps, drop, compute_dtype(x), run.flat
    )
    return (x, found) if y is None else found


def run_pre_norm(run: FusedRun, x: Tensor, parts: Sequence[Part], final: nn.Module) -> Tensor:
    """A stack of sublayers and the norm after them.

    Each sum with what a sublayer adds is taken together with the norm that comes next, and with the sublayer's last
    bias where linear maps are ours and can leave it out: its gradient needs no pass of its own then.
    """
    norms = [part.around.norm for part in parts] + [final]
    x, normed = add_norm(run, x, None, 0.0, norms[0])  # type: ignore[arg-type]
    for part, norm in zip(parts, norms[1:], strict=True):
        run.bias_to_leave = part.bias if run.linear else None
        y, left = part.sublayer(normed), run.linear and run.bias_to_leave is None
        dropout: nn.Module = part.around.dropout  # type: ignore[assignment]
        share = share_of(dropout, dropout.p)  # type: ignore[arg-type]
        x, normed = add_norm(run, x, y, share, norm, part.bias if left else None)  # type: ignore[arg-type]
    run.bias_to_leave = None
    return normed


ACTIVATIONS = {"relu": _BiasReluDropout, "gelu": _BiasGeluDropout}


def bias_activation_dropout(run: FusedRun, activation: str, z: Tensor, bias: Tensor | None, share: float) -> Tensor:
    """dropout(activation(z + bias)) for one of ACTIVATIONS."""
    out: Tensor = ACTIVATIONS[activation].apply(z, bias, Drop.of(run, share), run.flat)  # type: ignore[no-untyped-call]
    return out


def linear_relu(x: Tensor, linear: nn.Linear) -> Tensor | None:
    """relu(x Wᵀ + b) as one product in half precision, for its value alone.

    None where a gradient is wanted, dtypes differ, or another module stands there, which may compute something else;
    and in float32, where a GPU's product makes 0 of what is no number, and a broken model would look sound.
    """
    if torch.is_grad_enabled() or not is_as_made(linear, nn.Linear):
        return None
    weight, bias = linear.weight, linear.bias
    if bias is None or x.dtype == torch.float32 or not x.dtype == weight.dtype == bias.dtype:
        return None
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(bias))


def embed(
    run: FusedRun,
    ids_bt: Tensor,
    table: Tensor,
    language: Tensor | None,
    positions: Tensor | None,
    share: float,
    *,
    factor: float,
    fixnorm: bool,
) -> Tensor:
    """dropout(factor · rows + language + positions) in float32, from the table as it is stored.

    Positions are one for each id of a row, or, where none is learned, one for all.
    """
    drop = Drop.of(run, share)
    out: Tensor = _Embed.apply(ids_bt, table, language, positions, factor, fixnorm, drop, run.flat)  # type: ignore[no-untyped-call]
    return out


def unit_rows(run: FusedRun, table: Tensor, padded: int, dtype: torch.dtype) -> Tensor:
    """The table's rows as unit vectors, and rows of zeros up to `padded`."""
    out: Tensor = _UnitRows.apply(table, padded, dtype, run.flat)  # type: ignore[no-untyped-call]
    return out


def fits(width: int) -> bool:
    """Whether the kernels that hold whole rows take rows of this width."""
    return width <= WIDEST
