"""Runs the collector's own commands: ``python -m vitals_collector collector``."""

import sys

from trainvitals.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
