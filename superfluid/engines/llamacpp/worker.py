"""The program `superfluid-worker-llamacpp`."""

import sys

from superfluid.engines.llamacpp.runtime import LlamaCpp
from superfluid.worker import worker_main


def main() -> int:
    """Run one command of the worker, or serve; the exit code."""
    return worker_main.main(LlamaCpp())


if __name__ == "__main__":
    sys.exit(main())
