"""Which settings are best for a corpus: single changes, the best of them joined, more seeds; chosen on dev."""
