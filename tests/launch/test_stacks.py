"""A process that is asked where it stands says so and goes on."""

import signal
import subprocess
import sys
from subprocess import PIPE

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
SIGNALS = 200  # faulthandler's own handler lived through 114 on Python 3.11, through 9 on 3.12


def test_a_process_writes_its_stacks_as_often_as_it_is_asked_while_its_threads_compute():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for number in range(SIGNALS):
            process.send_signal(signal.SIGUSR1)
            seen = ""
            while "in <module>" not in seen:  # where the main thread's stack ends, the last one
                line = process.stderr.readline()
                assert line, f"the process died of signal {number}, exit code {process.wait()}"
                seen += line
            assert "in compute" in seen
        print("still here", file=process.stdin, flush=True)
        assert process.stdout.readline() == "still here\n"
        process.kill()
