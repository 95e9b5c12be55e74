"""``python -m jax_deepcompile`` is the ``deepcompile`` command."""

import sys

from jax_deepcompile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
