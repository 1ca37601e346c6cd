"""``megatron-dppo convert upcycle``."""

import sys

from megatron_dppo.commands.main import main

sys.exit(main(["convert", "upcycle", *sys.argv[1:]]))
