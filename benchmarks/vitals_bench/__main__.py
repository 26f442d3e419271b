"""`python -m vitals_bench`, from a checkout: what users install has no benchmarks."""

import sys

from vitals_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
