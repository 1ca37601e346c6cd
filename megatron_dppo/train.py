"""``torchrun ... -m megatron_dppo.train CONFIG [--section.key value ...]``."""

import sys

if __name__ == "__main__":
    from megatron_dppo.commands.main import train_main

    sys.exit(train_main())
