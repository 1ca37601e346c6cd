"""Imports an engine once, and starts servers that are forked from it. The engine's own interpreter runs this program.

Arguments: modules to import, separated by commas; the module to run; arguments of every server. Each line of the
standard input is a list of JSON, the file for a server's output and its own arguments. The answer is its process id.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys

modules, program, *common = sys.argv[1:]
for module in modules.split(","):
    importlib.import_module(module)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that have ended leave nothing behind
for line in sys.stdin:
    log, *arguments = json.loads(line)
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.setsid()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(output, 1)
os.dup2(output, 2)
sys.argv = [program, *common, *arguments]
runpy.run_module(program, run_name="__main__", alter_sys=True)
