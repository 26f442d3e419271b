"""A program that writes to a lake until it is killed."""

WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.collector.numbers.written import batch, identity
from vitals_collector.numbers.lake import Lake

lake = Lake(Path(sys.argv[1]))
who = identity()
key = who.run_id, who.incarnation, "steps"
print("open", lake.mark(key), flush=True)
seq = lake.mark(key) + 1
while True:
    lake.append([batch(who, [{"loss": float(seq + i)} for i in range(3)], first_seq=seq)])
    seq += 3
    print("stored", seq - 1, flush=True)
    if seq % 12 == 0:
        lake.merge()
"""
