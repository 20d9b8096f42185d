"""The language behind the demo corpus: words, their forms, phrases and sentences in Galician and English."""
