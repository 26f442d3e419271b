"""Makes `python -m trainvitals` the same as `vitals`."""

import sys

from trainvitals.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
