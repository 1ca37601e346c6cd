"""Settings of the tests with several processes."""

import os

import tests.shims  # noqa: F401

# The second update has used every state of the optimizer. ``make test-long`` compares a third one.
if not os.environ.get("EVERYTHING"):
    os.environ.setdefault("MEGATRON_DPPO_TEST_UPDATES", "2")
