"""Other toolkits' encoder-decoders of the same size as ours, and a step as most training scripts write it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Model

Step = Callable[[], None]


class ReleasedAttention(nn.Module):
    """QKNorm attention as the paper's released code computes it, restated: three projections, an explicit softmax."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.g = nn.Parameter(torch.tensor(12.6))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(y).view(len(y), -1, self.heads, y.shape[-1] // self.heads).transpose(1, 2)
                   for f, y in ((self.q, x), (self.k, memory), (self.v, memory)))  # fmt: skip
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (self.g * q @ k.transpose(-2, -1)).masked_fill(mask, -1e9).softmax(-1)
        return self.out((self.dropout(weights) @ v).transpose(1, 2).reshape(x.shape))


class ReleasedModel(nn.Module):
    """The paper's encoder-decoder in the manner of its released code, restated by us without any optimisation."""

    def __init__(self, vocabulary: int, settings: Model) -> None:
        super().__init__()
        width, drop = settings.width, settings.dropout.residual
        self.embedding = nn.Parameter(torch.empty(vocabulary, width).uniform_(-0.01, 0.01))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.positions = nn.Parameter(torch.randn(1024, width) * 0.02, requires_grad=False)
        self.layers = nn.ModuleList()
        for layer in range(settings.encoder_layers + settings.decoder_layers):
            attentions = 1 if layer < settings.encoder_layers else 2
            self.layers.append(nn.ModuleDict({
                "attention": nn.ModuleList(ReleasedAttention(width, settings.heads, drop) for _ in range(attentions)),
                "norms": nn.ModuleList(nn.LayerNorm(width) for _ in range(attentions + 1)),
                "ffn": nn.Sequential(nn.Linear(width, settings.feed_forward), nn.ReLU(), nn.Dropout(drop),
                                     nn.Linear(settings.feed_forward, width)),
            }))  # fmt: skip
        self.encoder_layers, self.drop, self.width = settings.encoder_layers, nn.Dropout(drop), width
        self.final = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        table = F.normalize(self.embedding, dim=-1)
        x, y = (
            self.drop(table[ids] * math.sqrt(self.width) + self.positions[: ids.shape[1]]) for ids in (source, target)
        )
        hidden = (source == 0)[:, None, None, :]
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        for layer in self.layers[: self.encoder_layers]:
            z = layer["norms"][0](x)
            x = x + self.drop(layer["attention"][0](z, z, hidden))
            x = x + self.drop(layer["ffn"](layer["norms"][1](x)))
        x = self.final[0](x)
        for layer in self.layers[self.encoder_layers :]:
            z = layer["norms"][0](y)
            y = y + self.drop(layer["attention"][0](z, z, future))
            y = y + self.drop(layer["attention"][1](layer["norms"][1](y), x, hidden))
            y = y + self.drop(layer["ffn"](layer["norms"][2](y)))
        return F.linear(self.final[1](y), table, self.bias)


class TorchModel(nn.Module):
    """torch.nn.Transformer of the same size."""

    def __init__(self, vocabulary: int, settings: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.width)
        self.transformer = nn.Transformer(
            settings.width, settings.heads, settings.encoder_layers, settings.decoder_layers, settings.feed_forward,
            settings.dropout.residual, batch_first=True, norm_first=True,
        )  # fmt: skip
        self.output = nn.Linear(settings.width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        hidden = source == 0
        states = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
        )  # fmt: skip
        return self.output(states)


def marian(vocabulary: int, settings: Model) -> nn.Module:
    """Hugging Face's Marian of the same size."""
    from transformers import MarianConfig, MarianMTModel

    drop = settings.dropout.residual
    config = MarianConfig(
        vocab_size=vocabulary, d_model=settings.width, encoder_layers=settings.encoder_layers,
        decoder_layers=settings.decoder_layers, encoder_ffn_dim=settings.feed_forward,
        decoder_ffn_dim=settings.feed_forward, encoder_attention_heads=settings.heads,
        decoder_attention_heads=settings.heads, dropout=drop, attention_dropout=drop, activation_function="relu",
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=2, max_position_embeddings=1024,
    )  # fmt: skip
    inner = MarianMTModel(config)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.inner(input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits

    return Wrapped()


def x_transformers(vocabulary: int, settings: Model) -> nn.Module:
    """x-transformers with its own query-key normalisation."""
    from x_transformers import XTransformer

    drop = settings.dropout.residual
    side = {"num_tokens": vocabulary, "heads": settings.heads, "max_seq_len": 1024, "attn_qk_norm": True}
    side |= {"attn_dropout": drop, "ff_dropout": drop}
    inner = XTransformer(
        dim=settings.width,
        **{f"enc_{k}": v for k, v in {**side, "depth": settings.encoder_layers}.items()},
        **{f"dec_{k}": v for k, v in {**side, "depth": settings.decoder_layers}.items()},
    )

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.inner.encoder(source, return_embeddings=True)
            return self.inner.decoder.net(target, context=memory)

    return Wrapped()


def plain_step(model: nn.Module, batch: tuple[Tensor, ...], half: bool, fused: bool) -> Step:
    """A step as most training scripts write it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
    source, target_in, target_out = batch

    def step() -> None:
        with torch.autocast(source.device.type, torch.bfloat16, enabled=half):
            logits = model(source, target_in)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), target_out.flatten(), ignore_index=0, label_smoothing=0.1
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step
