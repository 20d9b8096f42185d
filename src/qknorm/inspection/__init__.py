"""What attention does inside a model, to look at."""
