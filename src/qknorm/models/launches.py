"""How the kernels that memory bounds are spread over a GPU: one table, filled in from measurements.

`benchmarks/step_kernels.py --tune` times candidates on the GPU at hand, best first.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """What one program holds at once, and how many programs share the work."""

    entries: int
    """Rows times columns, or plain entries, of one program's tile; 8 to 64 a thread."""
    warps: int
    programs: int = 0
    """That walk over the tiles, those of all columns together; 0: as many as there are tiles."""
    columns: int = 0
    """Of a tile, for kernels that need no whole rows."""
    stages: int = 1
    """Tiles that are under way to a program at once."""
    evict: str = ""
    """What the cache is told of entries that are passed over once: "" or "evict_first"."""

    def rows(self, columns: int) -> int:
        """Of a tile with so many columns; at least the two that share draws."""
        return max(2, self.entries // columns)

    def share(self, tiles: int, across: int = 1) -> int:
        """Programs over so many tiles, where `across` columns of tiles stand side by side."""
        return tiles if self.programs == 0 else max(1, min(tiles, self.programs // across))

    def stages_of_rows(self, d: int) -> int:
        """Stages for tiles of whole rows of this width: one where more would not fit in small cards' shared memory."""
        return self.stages if d <= 2_048 else 1

    def over_rows(self, count: int, d: int) -> tuple[tuple[int], dict[str, int]]:
        """The grid over so many rows of this width for a kernel that holds whole rows, and its tile.

        A tile has at least the warps that a row fills with four entries a thread, up to 16.
        """
        block = max(64, 1 << (d - 1).bit_length())
        rows, warps = self.rows(block), max(self.warps, min(16, block // 128))
        apart = min(rows, max(1, 128 * warps // block))
        tile = {"d": d, "ROWS": rows, "BLOCK": block, "APART": apart, "num_warps": warps}
        return (self.share(-(-count // rows)),), tile

    def over_columns(self, count: int, d: int) -> tuple[tuple[int, int], dict[str, int]]:
        """The same for a kernel that needs no whole rows, with eight entries of a row a thread."""
        rows, across = self.rows(self.columns), -(-d // self.columns)
        apart = min(rows, max(1, 256 * self.warps // self.columns))
        tile = {"ROWS": rows, "BLOCK": self.columns, "APART": apart, "STAGES": self.stages, "num_warps": self.warps}
        return (self.share(-(-count // rows), across), across), tile


LAUNCHES = {
    "add_norm_forward": Launch(2_048, 4),
    "add_norm_backward": Launch(2_048, 4, programs=264, stages=3),
    "activation_forward": Launch(2_048, 4, columns=512),
    "relu_backward": Launch(2_048, 1, programs=1056, columns=256),
    "gelu_backward": Launch(1_024, 4, columns=512),
    "column_sum": Launch(4_096, 1, columns=64),
    "embed_forward": Launch(2_048, 4),
    "embed_backward": Launch(2_048, 4, programs=528),
    "unit_rows": Launch(2_048, 4),
    "squares": Launch(4_096, 8, programs=528, stages=3),
    "adam": Launch(2_048, 4, programs=264, stages=3),
}
"""By kernel. Programs that add up a parameter's gradient each add their part of it once, by atomic operations: the
fewer programs, the less these wait for each other."""
