"""A recorded step's updates computed again."""
