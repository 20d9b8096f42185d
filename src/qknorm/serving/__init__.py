"""A trained translator for people who never heard of PyTorch: an HTTP API, and a page that uses it."""
