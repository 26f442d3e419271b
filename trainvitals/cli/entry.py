"""Start of every `vitals` command; imports nothing before Ctrl-C is handled.

Importing the command line takes a second on a busy machine, and users interrupt mistyped commands.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 130 if Ctrl-C ends it while it loads."""
    try:
        from trainvitals.cli.main import main as run

        return run(argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
