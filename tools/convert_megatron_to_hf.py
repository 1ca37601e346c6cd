"""``megatron-dppo convert megatron-to-hf``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
