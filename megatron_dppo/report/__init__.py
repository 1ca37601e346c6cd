"""What a person sees of a run: console lines, curves, the closing summary."""
