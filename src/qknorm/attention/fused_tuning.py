"""Block shapes of the attention kernels: a fixed table, so that a first call compiles one kernel and tries none.

`python benchmarks/attention.py --tune` tries the candidates on a card and prints the best for this table.
"""

from typing import Literal, NamedTuple

Role = Literal["forward", "queries", "keys"]

SHORT = 1_024
"""Up to this length blocks of queries are smaller, so that there are enough of them for all multiprocessors."""

SMALL = 128
"""Up to this many queries and keys one program holds them all."""


class Blocks(NamedTuple):
    """Queries and keys that a program holds at a time, its warps, and how many loads are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


CHOSEN: dict[tuple[Role, int, bool], Blocks] = {  # (what, padded head dimension, over SHORT)
    ("forward", 32, False): Blocks(64, 64, 4, 3),
    ("forward", 64, False): Blocks(64, 64, 4, 3),
    ("forward", 128, False): Blocks(64, 64, 4, 3),
    ("forward", 256, False): Blocks(64, 32, 4, 3),
    ("forward", 32, True): Blocks(128, 128, 4, 3),
    ("forward", 64, True): Blocks(128, 128, 8, 3),
    ("forward", 128, True): Blocks(128, 128, 8, 2),
    ("forward", 256, True): Blocks(128, 64, 8, 2),
    ("queries", 32, False): Blocks(64, 64, 4, 3),
    ("queries", 64, False): Blocks(64, 64, 4, 3),
    ("queries", 128, False): Blocks(64, 64, 4, 2),
    ("queries", 256, False): Blocks(64, 32, 4, 2),
    ("queries", 32, True): Blocks(128, 64, 4, 3),
    ("queries", 64, True): Blocks(128, 64, 8, 3),
    ("queries", 128, True): Blocks(128, 64, 8, 2),
    ("queries", 256, True): Blocks(64, 32, 4, 2),
    ("keys", 32, False): Blocks(64, 64, 4, 3),
    ("keys", 64, False): Blocks(64, 64, 4, 3),
    ("keys", 128, False): Blocks(64, 64, 8, 2),
    ("keys", 256, False): Blocks(32, 64, 8, 2),
    ("keys", 32, True): Blocks(64, 128, 4, 3),
    ("keys", 64, True): Blocks(64, 128, 8, 3),
    ("keys", 128, True): Blocks(64, 128, 8, 2),
    ("keys", 256, True): Blocks(32, 64, 8, 2),
}

CANDIDATES: dict[Role, list[Blocks]] = {
    "forward": [Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 3), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3)],
    "queries": [Blocks(128, 64, 8, 2), Blocks(128, 128, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 3)],
    "keys": [Blocks(64, 128, 8, 2), Blocks(32, 128, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 128, 8, 1)],
}


def blocks_for(role: Role, padded_dim: int, itemsize: int, length: int) -> Blocks:
    """Blocks for sequences of this length: those chosen, or a quarter for float32, which takes more room."""
    chosen = CHOSEN[role, max(32, padded_dim), length > SHORT]
    if itemsize <= 2:
        return chosen
    return chosen._replace(rows=max(16, chosen.rows // 2), keys=max(16, chosen.keys // 2), stages=1)


def small_warps(rows: int, keys: int) -> int:
    """Warps of a program that holds all queries and keys."""
    return 8 if rows * keys > 64 * 64 else 4


def is_short(queries: int, keys: int, head_dim: int) -> bool:
    """Whether one program holds all queries and keys of a head in half precision: there the kernels are fastest."""
    rows, keys, padded_dim = (max(16, 1 << (size - 1).bit_length()) for size in (queries, keys, head_dim))
    return is_small(rows, keys, padded_dim, itemsize=2)


def is_small(rows: int, keys: int, padded_dim: int, itemsize: int) -> bool:
    """Whether one program can hold these queries and keys (each padded to a power of two) in registers."""
    most = 16_384 // itemsize  # entries of one operand: 128 × 64 or 64 × 128 in half precision
    return max(rows, keys) <= SMALL and max(rows, keys) * padded_dim <= most
