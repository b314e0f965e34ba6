"""python -m tests.simulation --seeds 10000 [--first N] | --seed N: run cases; a failing one prints how to replay it."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.simulation.cases import case_of
from tests.simulation.lives import run_case
from tests.simulation.world import Violation


def main() -> int:
    """The number of failing seeds, as an exit code of 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="this one only, with its case and its log")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL if asked.seed is None else logging.NOTSET)
    if asked.seed is not None:
        logging.basicConfig(level=logging.INFO)
        write(str(case_of(asked.seed)))
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else range(asked.seed, asked.seed + 1)
    began, failed, rounds, lives = time.process_time(), 0, 0, 0
    for seed in seeds:
        try:
            world = run_case(case_of(seed))
        except Violation as violation:
            failed += 1
            write(f"seed {seed}: {violation}\n    replay: python -m tests.simulation --seed {seed}")
            continue
        rounds, lives = rounds + world.rounds_in_all, lives + world.life + 1
    seconds = time.process_time() - began
    write(f"{len(seeds)} seeds, {lives} lives, {rounds} rounds of events in {seconds:.1f} CPU seconds: {failed} failed")
    return bool(failed)


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
