"""Settings of the tests with several processes."""

import tests.shims  # noqa: F401
