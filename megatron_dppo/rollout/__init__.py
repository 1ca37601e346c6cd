"""Rollouts: the engine protocol, the scheduler of requests, responses and how they are stored.

Imports no inference engine and no Megatron.
"""
