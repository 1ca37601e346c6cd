"""Pools of inference servers over HTTP: requests, answers, health, weight updates."""
