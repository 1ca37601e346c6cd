"""Agents of the tests, for the environment of ``tools/engines/agents.sh``."""
