"""``megatron-dppo doctor``: installed versions, known-bad combinations, servers, and a self-test."""
