"""Run the cases of the Triton kernels on the CPU, in Triton's interpreter (started by test_row_kernels_triton.py).

``TRITON_INTERPRET=1 python -m tests.unit.interpret_row_kernels`` prints one line of JSON for each case: its name and
how it failed, "" if it passed. A process of its own, because Triton reads the variable once, when it is imported, and
then interprets every kernel of the process.
"""

from __future__ import annotations

import inspect
import json
import traceback

import pytest

from tests.unit import row_gradient_cases, row_kernel_cases, word_hash_cases

CASES = {
    name: function
    for module in (row_kernel_cases, row_gradient_cases, word_hash_cases)
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not inspect.signature(function).parameters
}
"""the functions without parameters"""


def main() -> None:
    """Run all, go on after a failure."""
    import triton

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is not set"
    for name, run in CASES.items():
        try:
            run()
            failure = ""
        except (Exception, pytest.fail.Exception):
            failure = traceback.format_exc()
        print(json.dumps({"name": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
