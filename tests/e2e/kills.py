"""Real training processes to be killed: forked from a server that has imported everything, so they start fast."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.e2e.kills", "tandem.launch.session", "transformers.models.llama"])
TIMED = ("time/", "speed/", "buffer/", "health/slow_")


def main(arguments: list[str], kill_at_flush: int | None) -> None:
    """A process that trains; it kills itself at the n-th time that something is forced to disk."""
    import torch

    from tandem import cli
    from tandem.control import vault

    torch.set_num_threads(1)
    if kill_at_flush is not None:
        left, flush = kill_at_flush, vault.flush

        def counted(path: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            flush(path)

        vault.flush = counted
    sys.argv = ["tandem", "train", *arguments]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    cli.main()


def start(arguments: list[str], *, kill_at_flush: int | None = None) -> multiprocessing.Process:
    process = CONTEXT.Process(target=main, args=(arguments, kill_at_flush))
    process.start()
    return process


def run_to_the_end(arguments: list[str]) -> None:
    process = start(arguments)
    process.join()
    assert process.exitcode == 0


def kill_after(arguments: list[str], seconds: float) -> bool:
    """kill -9 after this time; False if it had ended before."""
    process = start(arguments)
    process.join(timeout=seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)  # it may end by itself between a look at it and the signal
    return process.exitcode != 0


def ended_with(run_dir: Path) -> tuple[dict[str, dict[str, int | str]], list[dict[str, float]]]:
    """The hashes of all weights and optimizer states of the last checkpoint, and every step's metrics."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    models = {name: record for name, record in files.items() if name.startswith(("actor/", "critic/"))}
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [
        {k: v for k, v in record.items() if not k.startswith(TIMED) and not k.endswith(("_s", "/tflops", "/mfu"))}
        for record in records
        if "rollout/reward" in record
    ]
    return models, steps


def moments(count: int, longest: float, seed: int) -> list[float]:
    return [random.Random(f"{seed}/{number}").uniform(0.05, longest) for number in range(count)]
