"""Start of every `vitals` command; imports nothing before Ctrl-C is handled.

Importing the command line takes a second on a busy machine, and users interrupt mistyped commands.
"""

import gc
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ``vitals`` command; return 130 if Ctrl-C ends it while it loads."""
    gc.disable()  # until the command runs: loading modules leaves no garbage
    try:
        from trainvitals.cli.main import main as run

        return run(argv)
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # otherwise the interpreter searches all objects when it exits


if __name__ == "__main__":
    sys.exit(main())
