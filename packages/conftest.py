"""Settings of the tests of packages that run with the trainer's: the same as of its own unit tests."""

from tests.conftest import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
    tokenizer,
    world,
)
from tests.unit.conftest import launcher_variables  # noqa: F401
