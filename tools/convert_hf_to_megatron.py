"""``megatron-dppo convert hf-to-megatron``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
