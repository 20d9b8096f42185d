"""Attention in the steps of a beam search on a GPU: our kernel beside PyTorch's (`attention_gpu.py --decoding`)."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_gpu import PLAIN, milliseconds, recorded, warn
from qknorm.attention.fused import normalize_scaled
from qknorm.attention.fused_decode import Launch, attend_few, launch_for

LAUNCHES = [Launch(k, w, n) for k in (16, 32, 64, 128) for w in (1, 2, 4) for n in (1, 2, 3)]
"""Candidates for `fused_decode.launch_for`."""
COPIES = 6
"""Layers of which each has keys and values of its own, so that they come from memory as they do in a search."""
BEAM, HEADS, HEAD_DIM = 4, 8, 64
LONGEST, PADDED = 175, 176
"""Tokens of the longest source of a real development set, and what all are padded to; their mean is about 29."""


def source_lengths(sentences: int) -> Tensor:
    """Lengths as a development set has them, longest first, the same in every run."""
    drawn = torch.empty(sentences).log_normal_(3.09, 0.74, generator=torch.Generator().manual_seed(0))
    lengths = drawn.round().clamp(2, LONGEST).sort(descending=True).values.long()
    lengths[0] = LONGEST
    return lengths


def decoding_masks(sentences: int, device: str = "cuda") -> dict[str, Tensor]:
    """What queries see of hypotheses' keys (by row) and of the source's (one row), −∞ where nothing: by name."""
    generator = torch.Generator().manual_seed(1)

    def scattered(rows: int, keys: int, hidden: float) -> Tensor:
        mask = torch.zeros(sentences, 1, rows, keys)
        mask.masked_fill_(torch.rand(mask.shape, generator=generator) < hidden, -torch.inf)
        mask[..., 0] = 0.0
        return mask

    masks = {f"{keys} own": scattered(BEAM, keys, 0.75) for keys in (64, 128, 256)}
    masks["256 own, 132 so far"] = scattered(BEAM, 256, 0.75)
    masks["256 own, 132 so far"][..., 132:] = -torch.inf
    masks |= {f"{keys} source": scattered(1, keys, 0.3) for keys in (48, 64)}
    real = torch.arange(PADDED) < source_lengths(sentences)[:, None]
    masks[f"{PADDED} source, padded"] = torch.zeros(real.shape).masked_fill(~real, -torch.inf)[:, None, None]
    return {name: mask.to(device, torch.bfloat16) for name, mask in masks.items()}


def keys_until_last(mask: Tensor) -> int:
    """Keys of all sentences up to the last that is seen, which no kernel can do without that does not pick them."""
    seen = (mask > -torch.inf).any(2)[:, 0]
    return int((seen * torch.arange(1, seen.shape[1] + 1, device=mask.device)).amax(1).sum())


def decoding_jobs(mask: Tensor, tuned: bool) -> dict[str, Callable[[], None]]:
    """Ways to attend in one step, in `COPIES` layers: 8 heads of 64, 4 hypotheses, over the keys of the mask."""
    place = {"device": mask.device, "dtype": mask.dtype}
    sentences, keys = len(mask), mask.shape[-1]
    room = torch.randn(COPIES, 2, sentences, HEADS, keys, HEAD_DIM, **place)
    queries = torch.randn(COPIES, sentences, BEAM, HEADS, HEAD_DIM, **place).transpose(2, 3)
    scale = torch.tensor(12.5, device=mask.device)

    def layers(one: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def job() -> None:
            for q, (k, v) in zip(queries, room, strict=True):
                one(q, k, v)

        return job

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)

    jobs = {
        PLAIN: layers(sdpa),
        "one pass over q + SDPA": layers(lambda q, k, v: sdpa(normalize_scaled(q, 2.0, scale), k, v)),
        "kernel": layers(lambda q, k, v: attend_few(q, k, v, 1.0, mask=mask)),
        "kernel, normalises q": layers(lambda q, k, v: attend_few(q, k, v, scale, mask=mask, normalise=True)),
        "kernel, no mask": layers(lambda q, k, v: attend_few(q, k, v, scale, normalise=True)),
    }
    for launch in LAUNCHES if tuned else []:

        def tried(q: Tensor, k: Tensor, v: Tensor, launch: Launch = launch) -> Tensor:
            return attend_few(q, k, v, scale, mask=mask, normalise=True, launch=launch)

        jobs[f"kernel, {tuple(launch)}"] = layers(tried)
    return jobs


def measure_decoding(sentences: int, tuned: bool, rounds: int) -> None:
    """Prints microseconds of one attention, and the gigabytes a second that these mean of keys up to the last seen."""
    print(f"{torch.cuda.get_device_name()}, {sentences} sentences, 4 × 8 × 64, bfloat16, PyTorch {torch.__version__}\n")
    print("| keys | what | µs | GB/s | of SDPA |\n|---|---|---|---|---|")
    for title, mask in decoding_masks(sentences).items():
        replays = {}
        for name, job in decoding_jobs(mask, tuned).items():
            try:
                replays[name] = recorded(lambda job=job: [job()])
            except Exception as problem:  # too large for the card; Triton's own errors have no narrower class
                warn(f"{name}: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}")
        times = {name: [milliseconds(replay, 5) for _ in range(rounds)] for name, replay in replays.items()}
        medians = {name: 1e3 * statistics.median(values) / COPIES for name, values in times.items()}
        for name, each in sorted(medians.items(), key=lambda pair: pair[1]) if tuned else medians.items():
            read = mask.shape[-1] * sentences if name == "kernel, no mask" else keys_until_last(mask)
            rate = read * HEADS * HEAD_DIM * 4 / each / 1e3
            chosen = " (chosen)" if name == f"kernel, {tuple(launch_for(16, HEAD_DIM, mask.shape[-1]))}" else ""
            print(f"| {title} | {name}{chosen} | {each:.1f} | {rate:,.0f} | {each / medians[PLAIN]:.2f}× |", flush=True)
