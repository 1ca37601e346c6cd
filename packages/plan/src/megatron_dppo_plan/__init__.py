"""A run rehearsed without a GPU: memory, collectives, arithmetic and time of each kind of rank."""
