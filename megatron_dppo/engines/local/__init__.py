"""The rollout engine inside the training processes."""
