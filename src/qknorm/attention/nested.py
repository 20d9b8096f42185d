"""Nested tensors, rows of many lengths, as padded ones and back; gradients flow both ways."""

import torch
from torch import Tensor


def check_nested(query: Tensor, key: Tensor, value: Tensor, others: dict[str, object]) -> None:
    """Refuses what is not self-attention without masks of one's own: that is all nested tensors are taken for."""
    if key is not query or value is not query:
        raise ValueError(
            "nested tensors are for self-attention, with one as query, key and value; for others use"
            " torch.nested.to_padded_tensor and key_padding_mask"
        )
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"{name} cannot be used with a nested tensor, whose lengths say what is padding (is_causal can); pad it"
                " by torch.nested.to_padded_tensor and give masks for that"
            )


def to_padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with zeros at their ends (b, t, width), and where these are: True in (b, t)."""
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    if nested.layout == torch.jagged:
        lengths: Tensor = nested.offsets().diff()  # type: ignore[attr-defined]
    else:
        lengths = torch.tensor([len(row) for row in nested.unbind()], device=nested.device)
    return padded, torch.arange(padded.shape[1], device=nested.device) >= lengths.unsqueeze(1)


def to_nested(padded: Tensor, hidden: Tensor, like: Tensor) -> Tensor:
    """The rows without their ends, in the layout of `like`, to which they can then be added."""
    if like.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(padded[~hidden], like.offsets())  # type: ignore[attr-defined]
    rows = zip(padded, like.unbind(), strict=True)
    return torch.nested.as_nested_tensor([row[: len(origin)] for row, origin in rows])
