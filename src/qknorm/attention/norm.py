"""Normalising queries and keys: the Lp norm, the scale g and its start, and the module that holds both."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.availability import why_no_kernels
from qknorm.attention.direction import direction_of
from qknorm.attention.values import derives_forward, numbers_of

Kind = Literal["lp", "rms", "layer", "none"]
Span = Literal["head", "width"]
Backend = Literal["auto", "reference", "sdpa", "fused"]

DEFAULT_LENGTH = 128
"""The sequence length a scale starts from where none is given: a paragraph of subwords."""


def lp_normalize(x: Tensor, p: float | Tensor = 2.0, dim: int = -1, eps: float | None = None) -> Tensor:
    """`x` divided by its Lp length along `dim`, for any p ≥ 1 or ∞; `p` may be a tensor that broadcasts and learns.

    A row whose largest entry is at most `eps` (the smallest normal number, if not given) is taken for padding: it
    comes out as zeros and gets a zero gradient. NaN or infinity in a row makes all of that row NaN. Half precision is
    computed in float32 and returned in its own dtype.
    """
    if not x.is_floating_point():
        raise TypeError(f"only floating-point tensors can be normalised, got {x.dtype}")
    check_p(p)
    return _normalize(x, p, dim, eps)


def normalize_over_heads(x_bhtd: Tensor, p: float = 2.0) -> Tensor:
    """x divided by its Lp length over heads and head_dim together, times heads^(1/p).

    Where all heads are equally long this is what `lp_normalize` gives for each of them.
    """
    check_p(p)
    x_bthd = x_bhtd.transpose(1, 2)
    unit_btw = _normalize(x_bthd.flatten(2), p)
    factor: float = x_bhtd.shape[1] ** (1 / p)
    return scale_by(unit_btw.view(x_bthd.shape).transpose(1, 2), factor)


def initial_scale(length: float) -> float:
    """The paper's start for g: log2 of the off-diagonal entries of a length × length score matrix."""
    if not length >= 2:
        raise ValueError(f"length must be at least 2 to have any off-diagonal entry, got {length}")
    return math.log2(length * length - length)


def matched_scale(scale: float, p: float, head_dim: int) -> float:
    """The scale that gives Lp-normalised Gaussian q, k logits of the same spread as `scale` gives for p = 2."""
    check_p(p)
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    return scale / _spread_over_l2(float(p), head_dim)


@functools.lru_cache(maxsize=256)
def _spread_over_l2(p: float, head_dim: int) -> float:
    """Standard deviation of q̂·k̂ for Gaussian q and k, relative to p = 2.

    By symmetry it is E[‖q‖₂²/‖q‖ₚ²]. With 1/Sᵃ = ∫ tᵃ⁻¹ e^(−tS) dt / Γ(a) for S = Σ|qᵢ|ᵖ, a = 2/p and t = r⁻ᵖ the
    expectation falls apart into coordinates, and two one-dimensional integrals over the half-normal density remain.
    """
    if p == 2 or head_dim == 1:
        return 1.0
    log_r = torch.linspace(-6, math.log(head_dim) + 14, 2_001, dtype=torch.float64).unsqueeze(1)
    r = log_r.exp()
    widest = torch.clamp(r * 40 ** (1 / p), max=12)  # beyond 12 the density ends; beyond 40^(1/p) the kernel does
    x = widest * torch.linspace(0, 1, 1_001, dtype=torch.float64)
    kernel = torch.exp(-((x / r) ** p)) if p < math.inf else torch.ones_like(x)
    weight = kernel * torch.exp(-0.5 * x * x) * math.sqrt(2 / math.pi)
    mass = torch.trapezoid(weight, x)
    second_moment = torch.trapezoid(weight * x * x, x)
    integrand = r.squeeze(1) ** -2 * mass ** (head_dim - 1) * second_moment
    return float(2 * head_dim / math.gamma(1 + 2 / p) * torch.trapezoid(integrand, log_r.squeeze(1)))


def scale_by(x_bht_: Tensor, scale: float | Tensor) -> Tensor:
    """x times the scale, one number or one a head, rounded once to x's own dtype."""
    if isinstance(scale, float) and scale == 1.0:
        return x_bht_
    if isinstance(scale, Tensor) and scale.dim() == 1 and scale.shape[0] > 1:
        if scale.shape[0] != x_bht_.shape[1]:
            raise ValueError(f"scale has {scale.shape[0]} numbers for {x_bht_.shape[1]} heads; give one, or one a head")
        scale = scale.view(-1, 1, 1)
    if isinstance(scale, Tensor) and x_bht_.dtype in (torch.float16, torch.bfloat16):
        return (x_bht_.float() * scale.float()).to(x_bht_.dtype)
    return (x_bht_ * scale).to(x_bht_.dtype)


def normalize_and_scale(x_bhtd: Tensor, p: float | Tensor, scale: float | Tensor, backend: Backend) -> Tensor:
    """scale · x/‖x‖ₚ for a p known to be valid: by the kernels of `fused`, where the back end and the input allow."""
    if backend in ("reference", "sdpa"):
        refusal: str | None = "another way is asked for"
    elif derives_forward():
        refusal = "its kernels have no forward-mode derivatives"
    else:
        refusal = fused_refusal(x_bhtd, p, scale)
    if refusal is None:
        from qknorm.attention.fused import normalize_scaled

        return normalize_scaled(x_bhtd, p, scale)
    if backend == "fused":
        raise ValueError(f"backend='fused' cannot be used here: {refusal}; backend='auto' takes another way")
    return scale_by(_normalize(x_bhtd, p), scale)


def fused_refusal(x_bhtd: Tensor, p: float | Tensor, scale: float | Tensor) -> str | None:
    """Why `fused.normalize_scaled` is not for this input; None if it is."""
    if torch.compiler.is_compiling():
        return "torch.compile fuses by itself"
    if (refusal := why_no_kernels(x_bhtd)) is not None:
        return refusal
    from qknorm.attention.fused import why_not

    return why_not(x_bhtd, p, scale)


def check_p(p: float | Tensor) -> None:
    """Refuses a p below 1, or that is no number, with a ValueError."""
    if isinstance(p, Tensor):
        if not torch.compiler.is_compiling() and not bool((numbers_of(p) >= 1).all()):
            raise ValueError("every p must be at least 1; below that the triangle inequality fails")
    elif not p >= 1:
        raise ValueError(f"p must be at least 1 (or infinity), got {p}")


def _normalize(x: Tensor, p: float | Tensor, dim: int = -1, eps: float | None = None) -> Tensor:
    """`lp_normalize` for a p known to be valid."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    eps = torch.finfo(wide.dtype).tiny if eps is None else eps
    if isinstance(p, Tensor):
        p = p.to(wide.dtype)
    return direction_of(wide, p, dim, eps).to(x.dtype)


class QKNorm(nn.Module):
    """Normalises queries and keys per head and holds the scale of their logits: one class for the ways in use.

    - `lp`: unit Lp length, times a learned scale (the paper's g) that starts at log2(L² − L). p = 2 is the paper's.
    - `rms`, `layer`: RMSNorm or LayerNorm over the head with weights of their own for q and k, logits divided by √d,
      as in Qwen3 and Gemma 3, or ViT-22B and timm.
    - `none`: dot-product attention, logits divided by √d.

    `scale` holds one number, or one per head; as a vector, which FSDP can share out. `p_learned` learns p ≥ 1 for every
    key head, from `p` on. A p that is fixed, and not 2, is in the state dict as `p_fixed`, so that a state that was
    learned with one p is refused by a module with another. A module made on meta is at its start once `to_empty` gives
    it memory.

    With `query_over="width"` (of `lp`) a query's length is taken over all heads together, so that they share it out
    between them; a factor heads^(1/p) keeps what the scale means.
    """

    p_fixed: Tensor | None

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        kind: Kind = "lp",
        p: float = 2.0,
        p_learned: bool = False,
        scale_init: float | None = None,
        length: float | None = None,
        scale_learned: bool | None = None,
        scale_per_head: bool = False,
        normalize_values: bool = False,
        query_over: Span = "head",
        num_kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scale_init is not None and length is not None:
            raise ValueError("the scale starts from scale_init or from length, not from both")
        _check_kind(kind, p, p_learned, query_over)
        self.query_over = query_over
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads or num_heads
        self.kind, self.p_init, self.values_normalized = kind, float(p), normalize_values
        self.scale_learned = kind == "lp" if scale_learned is None else scale_learned
        if scale_init is None:
            scale_init = initial_scale(length or DEFAULT_LENGTH) if kind == "lp" else head_dim**-0.5
        self.scale_init = float(scale_init)

        place = {"device": device, "dtype": dtype}
        scale = torch.empty(num_heads if scale_per_head else 1, **place)  # type: ignore[arg-type]
        if self.scale_learned:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)
        self.p_raw = nn.Parameter(torch.empty(self.num_kv_heads, **place)) if p_learned else None  # type: ignore[arg-type]
        told = not p_learned and p != 2 and (kind == "lp" or normalize_values)
        self.register_buffer("p_fixed", torch.empty((), device=device, dtype=torch.float32) if told else None)
        if kind == "rms":
            self.q_norm: nn.Module = nn.RMSNorm(head_dim, eps=1e-6, **place)  # type: ignore[arg-type]
            self.k_norm: nn.Module = nn.RMSNorm(head_dim, eps=1e-6, **place)  # type: ignore[arg-type]
        elif kind == "layer":
            self.q_norm = nn.LayerNorm(head_dim, eps=1e-6, **place)  # type: ignore[arg-type]
            self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, **place)  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Puts the scale and p back to their start, and the weights of `rms` and `layer` to one."""
        with torch.no_grad():
            self.scale.fill_(self.scale_init)
            if self.p_fixed is not None:
                self.p_fixed.fill_(self.p_init)
            if self.p_raw is not None:
                self.p_raw.fill_(math.log(math.expm1(self.p_init - 1)))
        for norm in self.children():
            norm.reset_parameters()  # type: ignore[operator]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Off meta there is memory that nobody has filled; the start is known, so that it is filled at once."""
        was_meta = self.scale.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.scale.is_meta:
            self.reset_parameters()
        return self

    @property
    def scale_per_head(self) -> bool:
        """Whether every head has a scale of its own."""
        return self.scale.numel() > 1

    @property
    def p(self) -> float | Tensor:
        """The p in force: a number, or, where learned, one for every key head."""
        return self.p_init if self.p_raw is None else 1 + F.softplus(self.p_raw)

    def query(self, q_bhtd: Tensor) -> Tensor:
        """Normalised queries, not yet scaled."""
        if self.query_over == "width":
            return normalize_over_heads(q_bhtd, self.p_init)
        if self.kind == "lp":
            return _normalize(q_bhtd, self.p_for(self.num_heads))
        return q_bhtd if self.kind == "none" else _apply_in_own_dtype(self.q_norm, q_bhtd)

    def scaled_query(self, q_bhtd: Tensor, backend: Backend = "auto") -> Tensor:
        """Normalised queries times the scale, for attention with a scale of 1: one pass where kernels allow it."""
        if self.kind == "lp" and self.query_over == "head":
            return normalize_and_scale(q_bhtd, self.p_for(self.num_heads), self.scale, backend)
        return scale_by(self.query(q_bhtd), self.scale)

    def key(self, k_bhsd: Tensor, backend: Backend = "auto") -> Tensor:
        """Normalised keys."""
        if self.kind == "lp":
            return normalize_and_scale(k_bhsd, self.p_for(self.num_kv_heads), 1.0, backend)
        return k_bhsd if self.kind == "none" else _apply_in_own_dtype(self.k_norm, k_bhsd)

    def value(self, v_bhsd: Tensor) -> Tensor:
        """Values, normalised only where `normalize_values` asks for it (the paper's ablation)."""
        return _normalize(v_bhsd, self.p_for(self.num_kv_heads)) if self.values_normalized else v_bhsd

    def forward(self, q_bhtd: Tensor, k_bhsd: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised queries and keys, ready for `attend(…, scale=norm.scale)`."""
        return self.query(q_bhtd), self.key(k_bhsd)

    def p_for(self, heads: int) -> float | Tensor:
        """The p in force, for this many heads of queries or keys: a number, or (heads, 1, 1)."""
        p = self.p
        if isinstance(p, Tensor):
            return p.repeat_interleave(heads // self.num_kv_heads).view(-1, 1, 1)
        return p

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Takes a scale that was saved as a number without dimensions; refuses a state of another p."""
        scale = state_dict.get(f"{prefix}scale")
        if scale is not None and scale.dim() == 0 and self.scale.shape == (1,):
            state_dict[f"{prefix}scale"] = scale.reshape(1)
        if self.p_raw is None:
            saved = state_dict.pop(f"{prefix}p_fixed", None)
            if saved is not None and not saved.is_meta and not same_p(float(saved), self.p_init):
                errors = lists[2]
                errors.append(f"{prefix}p_fixed: the state was saved with p = {saved_p(saved):g}, not {self.p_init:g}")
                saved = None
            if self.p_fixed is not None:  # older states do not have it
                place = None if scale is None else scale.device
                state_dict[f"{prefix}p_fixed"] = torch.tensor(self.p_init, device=place) if saved is None else saved
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def extra_repr(self) -> str:
        parts = [self.kind, f"head_dim={self.head_dim}", f"heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"kv_heads={self.num_kv_heads}")
        if self.kind == "lp":
            parts.append(f"p={self.p_init:g}" + (" learned from there" if self.p_raw is not None else ""))
        learned = "learned from" if self.scale_learned else "fixed at"
        parts.append(f"scale {learned} {self.scale_init:.4g}" + (" per head" if self.scale_per_head else ""))
        if self.values_normalized:
            parts.append("values normalised too")
        if self.query_over == "width":
            parts.append("queries over all heads together")
        return ", ".join(parts)


def saved_p(p_fixed: Tensor) -> float:
    """The p that a state has as `p_fixed`: the shortest number that is the same in the dtype it was cast to."""
    exact = float(p_fixed)
    candidates = (float(f"{exact:.{digits}g}") for digits in range(1, 18))
    return next((each for each in candidates if float(p_fixed.new_tensor(each)) == exact), exact)


def same_p(saved: float, p: float) -> bool:
    """Whether a p from a state is this one, perhaps after a cast to half precision."""
    return math.isclose(saved, p, rel_tol=2**-8)


def _apply_in_own_dtype(norm: nn.Module, x: Tensor) -> Tensor:
    """Under autocast a norm may answer in float32; attention wants q, k and v alike."""
    y: Tensor = norm(x)
    return y.to(x.dtype)


def _check_kind(kind: str, p: float, p_learned: bool, query_over: str) -> None:
    if kind not in ("lp", "rms", "layer", "none"):
        raise ValueError(f"queries and keys are normalised by lp, rms, layer or none, not by {kind!r}")
    if p_learned and not (kind == "lp" and 1 < p < math.inf):
        raise ValueError(f"a learned p needs kind='lp' and a start above 1 and below infinity, got {kind!r}, {p}")
    if query_over not in ("head", "width"):
        raise ValueError(f"query_over must be head or width, got {query_over!r}")
    if query_over == "width" and (kind != "lp" or p_learned):
        raise ValueError(f"query_over='width' needs kind='lp' and a fixed p, got {kind!r}, p_learned={p_learned}")
    check_p(p)
