"""The policy's weights on their way to engines, and the proof that they arrived."""
