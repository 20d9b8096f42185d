"""The papers' experiments, as data."""
