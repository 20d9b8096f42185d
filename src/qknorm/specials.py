"""The token ids that mean the same in every vocabulary: padding, an unknown token, start and end of a sentence."""

PAD, UNKNOWN, START, END = range(4)
