"""``megatron-dppo convert check``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "check", *sys.argv[1:]]))
