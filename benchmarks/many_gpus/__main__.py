"""One part of benchmarks/many_gpus.sh, or the table of all: `python -m benchmarks.many_gpus a --gpus 8 --out DIR`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from benchmarks.many_gpus.place import Place
from benchmarks.many_gpus.runs import APART, COLOCATED, LEADS, apart, colocated
from benchmarks.many_gpus.table import SYNC, table
from benchmarks.many_gpus.updates import FSDP, MEGATRON, fsdp, megatron


def sync(place: Place) -> int:
    """Weights to engines on GPUs of their own; to one on the trainer's where there is no other."""
    kept = ["--json", str(place.out / SYNC), "--device", place.device, "--patience", str(place.patience_s)]
    if place.cpu:
        way = ["--way", "collective", "--shapes", "tiny", "--bucket-bytes", "20000", "--rounds", "1"]
    elif place.gpus == 1:
        place.note("e", "handles of the one GPU's memory: a collective over NVLink needs 2, 1 here")
        way = ["--way", "ipc"]
    else:
        half = place.gpus // 2
        way = ["--way", "collective", "--trainers", str(place.gpus - half), "--engines", str(half)]
    return subprocess.run([sys.executable, "-m", "benchmarks.weight_sync", *kept, *way]).returncode


PARTS: dict[str, Callable[[Place], int]] = {"a": fsdp, "b": megatron, "c": colocated, "d": apart, "e": sync}
KEPT = {
    "a": [FSDP],
    "b": [MEGATRON],
    "c": [COLOCATED],
    "d": [APART, *(f"{APART}-{lead}" for lead in LEADS)],
    "e": [SYNC],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "table"])
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="for metrics, recipes and logs")
    parser.add_argument("--scratch", type=Path, default=Path(gettempdir()), help="for models")
    parser.add_argument("--seconds", type=float, default=600.0, help="that the part has")
    asked = parser.parse_args()
    if asked.part == "table":
        print(table(asked.out))
        return 0
    place = Place(asked.gpus, asked.cpu, asked.out.resolve(), asked.scratch.resolve(), asked.seconds)
    place.forget(asked.part, KEPT[asked.part])
    return PARTS[asked.part](place)


if __name__ == "__main__":
    raise SystemExit(main())
