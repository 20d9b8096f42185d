"""Models built on the attention library."""
