"""Makes `python -m trainvitals` the same as `vitals`."""

import sys

from trainvitals.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
