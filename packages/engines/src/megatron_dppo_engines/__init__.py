"""Clients of released SGLang and vLLM servers that check each response and prove the weights.

The lowest package: it imports neither the trainer nor another package beside it.

    errors  <-  responses, routes, sums  <-  server (the protocol)  <-  servers (HTTP, contract, pool)  <-  sglang, vllm
    serving: what servers need, their processes, what vLLM loads
"""
