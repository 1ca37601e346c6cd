"""Final answers in responses: thinking tags, extraction, normalization, a grammar, and equality of values."""
