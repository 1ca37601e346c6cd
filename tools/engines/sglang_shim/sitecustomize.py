"""Python runs this at start-up because the folder is on PYTHONPATH: every process that SGLang spawns gets the shim."""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import sglang_cpu

    sglang_cpu.install()
