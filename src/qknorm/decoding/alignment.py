"""Which source word each target word came from, read off cross-attention."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qknorm.attention import MultiheadAttention
from qknorm.models.translator import Translator
from qknorm.specials import END, START
from qknorm.text.subwords import END_OF_WORD, SPACE, SPECIALS, Tokenizer


@torch.no_grad()
def cross_attention_weights(model: Translator, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Weights (layers, heads, target tokens, source tokens) with which each target token, and the end, was produced."""
    device = next(model.parameters()).device
    source_ids = torch.tensor([[*source, END]], device=device)
    target_ids = torch.tensor([[START, *target]], device=device)
    gathered: list[Tensor] = []

    def gather(module: MultiheadAttention, inputs: tuple[Tensor, ...], options: dict[str, object]) -> None:
        gathered.append(module(*inputs, visibility=options["visibility"], average_attn_weights=False)[1][0])

    hooks = []
    for name, attention in model.attentions().items():
        if name.endswith("cross"):
            hooks.append(_call_beside(attention, gather))
    training = model.training
    try:
        model.eval()
        model.decode(target_ids, model.encode(source_ids))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return torch.stack(gathered)


def align_words(model: Translator, tokenizer: Tokenizer, text: str, target: Sequence[int]) -> list[tuple[int, int]]:
    """(source word, target word) links, one for each target word: the word of `text` it attended to most.

    Read from the layer before the last, whose heads together align best (Garg et al. 2019).
    """
    words = [tokenizer.encode(word) for word in text.split(" ")]  # no token reaches over a space
    source = [number for word in words for number in word]
    if not source or not tokenizer.decode(target).strip():
        return []
    weights = cross_attention_weights(model, source, target)
    layer = max(0, len(weights) - 2)
    attention = weights[layer].mean(dim=0)[: len(target), : len(source)].cpu()
    source_words = [number for number, word in enumerate(words) for _ in word]
    target_words = word_numbers(tokenizer, target)
    by_word = torch.zeros(target_words[-1] + 1, source_words[-1] + 1)
    rows = torch.zeros(len(target), source_words[-1] + 1).index_add_(1, torch.tensor(source_words), attention)
    by_word.index_add_(0, torch.tensor(target_words), rows)
    return [(int(best), word) for word, best in enumerate(by_word.argmax(dim=1))]


def word_numbers(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """For each token of a translation the number of the word of its text that it is part of.

    Special tokens stand for nothing there, and a space by itself is part of the word that follows.
    """
    numbers, begun, inside = [], 0, False
    for text in _texts(tokenizer, ids):
        if text.strip() and (not inside or text.startswith(" ")):
            begun += 1
            inside = True
        elif text.startswith(" "):
            inside = False
        numbers.append(begun - 1 if inside else begun)
        inside = inside and not text.endswith(" ")
    return [max(0, min(number, begun - 1)) for number in numbers]


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """What each token adds to the text, with the space before or after it."""
    for number, token in zip(ids, tokenizer.tokens(ids), strict=True):
        if number < len(SPECIALS):
            yield ""
        elif tokenizer.pretokenized:
            yield token.removesuffix(END_OF_WORD) + " " * token.endswith(END_OF_WORD)
        else:
            yield token.replace(SPACE, " ")


def _call_beside(attention: MultiheadAttention, gather: object) -> torch.utils.hooks.RemovableHandle:
    """Calls `gather` with what the module is called with, without changing what it returns or calling itself."""
    busy = False

    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], options: dict[str, object]) -> None:
        nonlocal busy
        if not busy:
            busy = True
            gather(module, inputs, options)  # type: ignore[operator]
            busy = False

    return attention.register_forward_pre_hook(hook, with_kwargs=True)
