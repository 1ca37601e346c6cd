"""``megatron-dppo convert quantize``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "quantize", *sys.argv[1:]]))
