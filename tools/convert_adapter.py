"""``megatron-dppo convert adapter``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "adapter", *sys.argv[1:]]))
