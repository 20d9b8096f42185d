"""From a trained model to text: search for the best sentence, and translation around it."""
