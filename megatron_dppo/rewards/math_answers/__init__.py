"""Final answers of mathematics: extraction, normalization, a grammar, and equality."""
