"""The output layer and its loss in one pass over vocabulary shards; nothing of vocabulary size is kept."""
