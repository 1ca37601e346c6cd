"""Settings of the unit tests."""

import tests.shims  # noqa: F401
