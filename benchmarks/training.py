"""A training step of ours beside other toolkits' models: same sizes, same batch, same device, in one run.

    python benchmarks/training.py                                       # the paper's 6+6 model on this machine
    python benchmarks/training.py --preset paper-qknorm-gl-en --steps 10 --out docs/results/training-cpu.md
    python benchmarks/training.py --smoke                                # tiny, to see that everything still runs

A step is all of it: forward, loss, backward, clipping, optimiser. Every peer trains on real target tokens only.
"""

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Model, Training
from qknorm.models.translator import Translator
from qknorm.studies.recipes import preset
from qknorm.training.fit import quick_kernels
from qknorm.training.step import TrainingStep

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

    side = {"num_tokens": vocabulary, "heads": settings.heads, "max_seq_len": 1024, "attn_qk_norm": True}
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


def our_step(model: Translator, batch: tuple[Tensor, ...], half: bool, compiled: bool) -> Step:
    settings = Training(precision="bfloat16" if half else "float32", compile=compiled)
    step = TrainingStep(model, model, settings, batch[0].device)
    tokens = int((batch[2] != 0).sum())
    return lambda: step([batch], tokens, 1e-4)


def make_peers(args: argparse.Namespace, settings: Model, batch: tuple[Tensor, ...]) -> dict[str, Callable[[], Step]]:
    device, half, cuda = batch[0].device, args.dtype == "bfloat16", batch[0].is_cuda

    def ours(norm: str, compiled: bool) -> Step:
        attention = settings.attention.model_copy(update={"qk_norm": norm})
        model = Translator(
            args.vocabulary,
            settings.model_copy(update={"attention": attention}),
            scale_init=12.6 if norm == "lp" else None,
        )
        return our_step(model.to(device), batch, half, compiled)

    def peer(make: Callable[[], nn.Module], half: bool = half, fused: bool = True, compiled: bool = False) -> Step:
        model = make().to(device)
        return plain_step(torch.compile(model) if compiled else model, batch, half, fused)  # type: ignore[arg-type]

    peers: dict[str, Callable[[], Step]] = {"ours, QKNorm": lambda: ours("lp", False)}
    if cuda or args.compile:
        peers["ours, QKNorm, compiled"] = lambda: ours("lp", True)
    peers["ours, dot product"] = lambda: ours("none", cuda)
    peers["released code, restated (fp32)"] = lambda: peer(
        lambda: ReleasedModel(args.vocabulary, settings), half=False, fused=False
    )
    peers["torch.nn.Transformer"] = lambda: peer(lambda: TorchModel(args.vocabulary, settings))
    peers["Hugging Face Marian"] = lambda: peer(lambda: marian(args.vocabulary, settings))
    peers["x-transformers, qk_norm"] = lambda: peer(lambda: x_transformers(args.vocabulary, settings))
    if cuda:
        peers["torch.nn.Transformer, compiled"] = lambda: peer(
            lambda: TorchModel(args.vocabulary, settings), compiled=True
        )
        peers["Hugging Face Marian, compiled"] = lambda: peer(lambda: marian(args.vocabulary, settings), compiled=True)
    return peers


def measure(make: Callable[[], Step], steps: int, cuda: bool, show_profile: bool = False) -> tuple[float, float]:
    """Median milliseconds of a step, and the seconds until the first one was done."""
    began = time.perf_counter()
    step = make()
    step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(3):
        step()
    if show_profile:
        with torch.profiler.profile() as profiler:
            step()
            if cuda:
                torch.cuda.synchronize()
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=80))
    times = []
    for _ in range(steps):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--preset", default="paper-qknorm-en-vi")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=8_217)
    parser.add_argument("--steps", type=int, default=50 if cuda else 5)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--compile", action="store_true", help="measure compiled code on the CPU too")
    parser.add_argument("--only", help="measure only peers whose name contains this")
    parser.add_argument("--profile", action="store_true", help="show where the time of each peer's step goes")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    args = parser.parse_args()
    settings = preset(args.preset).model
    if args.smoke:
        small = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        settings, args.rows, args.length, args.vocabulary, args.steps = settings.model_copy(update=small), 4, 8, 50, 2
    torch.manual_seed(0)
    device = torch.device(args.device)
    ids = torch.randint(4, args.vocabulary, (args.rows, args.length), device=device)
    batch = (ids, ids, ids)
    tokens = ids.numel()
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    lines = [
        f"{where}, {args.dtype}, {settings.encoder_layers}+{settings.decoder_layers} layers of {settings.width}, batch "
        f"{args.rows} × {args.length}, {args.vocabulary:,} types, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "",
        "| what | ms a step | target tokens/s | ratio to ours | first step after, s |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    base = None
    for name, make in make_peers(args, settings, batch).items():
        if args.only and args.only not in name:
            continue
        try:
            with quick_kernels(device):
                milliseconds, first = measure(make, args.steps, device.type == "cuda", args.profile)
        except ImportError as error:
            row = f"| {name} | not installed ({error.name}) | | | |"
        else:
            base = base or milliseconds
            rate = tokens / milliseconds * 1e3
            row = f"| {name} | {milliseconds:.2f} | {rate:,.0f} | {milliseconds / base:.2f}× | {first:.1f} |"
        lines.append(row)
        print(row, flush=True)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
