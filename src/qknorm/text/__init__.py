"""Files → sentence pairs → token ids → batches. Knows nothing of models."""
