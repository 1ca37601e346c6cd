"""The policy that is trained: its warm-up, its update, its scores."""
