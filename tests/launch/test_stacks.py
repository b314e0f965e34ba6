"""A process that is asked where it stands says so and goes on."""

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

PROGRAM = """
import threading
from tandem.launch import stacks

stacks.write_on_signal()

def deep(levels):
    return sum(deep(levels - 1) for _ in range(2)) if levels else 1

def compute():
    while True:
        deep(12)

threading.Thread(target=compute, daemon=True).start()
print("ready", flush=True)
while line := input():
    print(line, flush=True)
"""
BURSTS = 500  # of signals; with faulthandler's handler for all threads it died of one of the first 300
BURST = 20  # signals, most of which find the main thread waiting and the other one computing
ENOUGH = 10  # stacks


def test_a_process_writes_its_stacks_as_often_as_it_is_asked_while_its_threads_compute(tmp_path: Path):
    command, written = [sys.executable, "-c", PROGRAM], tmp_path / "stderr"
    with written.open("w") as stderr, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=stderr) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for number in range(100_000):  # signals that come while stacks are being written ask for nothing more
            for _ in range(BURST):
                process.send_signal(signal.SIGUSR1)
            process.stdin.write(b"still here?\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer == b"still here?\n", f"it died of burst {number}, exit code {process.wait()}"
            if number >= BURSTS and (stacks := written.read_text()).count("in <module>") >= ENOUGH:
                break
        else:
            pytest.fail(written.read_text())
        assert stacks.count("in compute") >= ENOUGH
        process.kill()
