"""Memory of training on the CPU: kept by the process instead of asked for again in every step."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what glibc's malloc.h calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_KEPT, _MOST_IN_OLD_GLIBC = 2**30, 2**25


def keep_freed_memory() -> None:
    """Lets this process use again up to 1 GiB of what it frees, where that can be had (with glibc alone).

    Otherwise large tensors go back to the system when they are freed, and the system must find and clear their pages
    in the next step: about a tenth of the time of a small model's step.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    if set_option(_MMAP_THRESHOLD, _KEPT) or set_option(_MMAP_THRESHOLD, _MOST_IN_OLD_GLIBC):
        set_option(_TRIM_THRESHOLD, _KEPT)
