"""The first paper's tables and figures, and what it left open: experiments, results, comparisons, pages."""
