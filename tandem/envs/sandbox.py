"""Runs Python that a model wrote in a process that can do nothing but compute: see sandbox_child.py for its walls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tandem.config.env import CodeVerifier
from tandem.types import RolloutFailed

# What Python itself reads while it runs: its library, and the system's.
SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
START_TIMEOUT_S = 60.0
ERROR_CHARS = 400

# Tries what must not be possible, and says what was. `outside` and `secret` lie beside its own folder.
PROBE = """
import json, os, resource, socket, sys
outside, secret, home, memory, file_bytes = json.loads(sys.stdin.readline())
open_walls = []

def wall(name, act):
    try:
        act()
    except (OSError, MemoryError, ValueError):
        return
    open_walls.append(name)

def fork():
    if os.fork() == 0:
        os._exit(0)

def write_much():
    with open("much", "wb") as file:
        file.write(bytes(file_bytes + 1))

wall("network", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
wall("network", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
wall("processes", fork)
wall("processes", lambda: os.execv(sys.executable, [sys.executable, "-c", ""]))
wall("processes", lambda: os.kill(os.getppid(), 0))
wall("memory", lambda: bytearray(memory))
wall("reading outside its folder", lambda: open(secret).read())
wall("reading the home directory", lambda: os.listdir(home))
wall("writing outside its folder", lambda: open(outside, "w"))
wall("writing outside its folder", lambda: open(secret, "a"))
wall("writing outside its folder", lambda: os.unlink(secret))
wall("writing outside its folder", lambda: os.chmod(secret, 0o777))
wall("writing outside its folder", lambda: os.truncate(secret, 0))
wall("writing outside its folder", lambda: os.close(os.open(secret, os.O_RDONLY | os.O_TRUNC)))
wall("file size", write_much)
wall("resources", lambda: resource.setrlimit(resource.RLIMIT_CPU, (3600, 3600)))
if resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY:
    open_walls.append("cpu time")
with open("inside", "w") as file:
    file.write("its own folder can be used")
print(json.dumps(open_walls))
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended, what it printed, and how many tests passed: None where the last was not reached."""

    ended: str  # "" when by itself with exit code 0, else why, in words
    output: bytes
    passed: int | None = None


# A statement, and whether it counts as a test; the others prepare the tests.
Tests = Sequence[tuple[str, bool]]


class Sandbox:
    """Runs programs, a few at one time. Building one proves that its walls stand, or says which does not."""

    def __init__(self, config: CodeVerifier) -> None:
        if sys.platform != "linux":
            raise ValueError(
                f"env.verifier.name=code runs what a model wrote, and its sandbox is made of parts of Linux (Landlock,"
                f" seccomp), but this is {sys.platform}: run on Linux, or score with another verifier"
            )
        self._config = config
        self._turns = asyncio.Semaphore(config.num_workers)
        self._check_walls()

    async def run(self, source: str, *, stdin: bytes = b"", tests: Tests | None = None) -> Outcome:
        """Run a program until it ends or passes a limit. RolloutFailed when the sandbox itself does not stand."""
        async with self._turns:
            with tempfile.TemporaryDirectory(prefix="tandem-sandbox-") as folder:
                nonce = uuid4().hex
                job = _job(self._config, folder, source, tests, nonce)
                process = await asyncio.create_subprocess_exec(
                    *_command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_environment(folder),
                    start_new_session=True,
                )
                try:
                    output, ended = await self._follow(process, job + stdin)
                finally:
                    if process.returncode is None:
                        process.kill()
                    await process.communicate()  # a pipe that is full would keep wait() from ending
        code = process.returncode
        return _outcome(output, ended or (f"exit code {code}" if code else ""), nonce)

    async def _follow(self, process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, str]:
        """What the process prints until it ends or passes a limit, and which. Its clock starts when its walls stand."""
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        feeding = asyncio.ensure_future(_feed(process.stdin, given))
        output, first, most = bytearray(), b"", self._config.output_bytes
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await process.stdout.readline()
            if first.rstrip() != STANDING:
                why = _said(first) or "it said nothing"
                raise RolloutFailed(f"the sandbox of env.verifier.name=code did not stand: {why}", "infrastructure")
            async with asyncio.timeout(self._config.timeout_s):
                while len(output) <= most and (part := await process.stdout.read(1 << 16)):
                    output += part
                if len(output) <= most:
                    await process.wait()
        except TimeoutError:
            if not first:
                raise RolloutFailed(
                    f"the sandbox of env.verifier.name=code did not start in {START_TIMEOUT_S:g} s", "infrastructure"
                ) from None
            return bytes(output), f"not done after timeout_s={self._config.timeout_s:g}"
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        return bytes(output[:most]), f"printed more than output_bytes={most}" if len(output) > most else ""

    def _check_walls(self) -> None:
        """Try from the inside all that must not be possible. ValueError names each wall that does not stand."""
        with tempfile.TemporaryDirectory(prefix="tandem-sandbox-") as top:
            folder, secret = Path(top, "inside"), Path(top, "secret")
            folder.mkdir()
            secret.write_text("not to be read")
            home = str(Path.home())
            tried = [str(Path(top, "written")), str(secret), home, self._config.memory_bytes, self._config.file_bytes]
            given = _job(self._config, str(folder), PROBE, None, "") + json.dumps(tried).encode() + b"\n"
            try:
                done = subprocess.run(
                    _command(),
                    input=given,
                    capture_output=True,
                    cwd=folder,
                    env=_environment(str(folder)),
                    start_new_session=True,
                    timeout=START_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired as error:
                raise ValueError(
                    f"env.verifier.name=code: the sandbox did not start in {START_TIMEOUT_S:g} s"
                ) from error
        first, _, rest = done.stdout.partition(b"\n")
        if first != STANDING:
            why = _said(first) or done.stderr[-ERROR_CHARS:].decode(errors="replace")
            raise ValueError(f"env.verifier.name=code: a wall of the sandbox cannot be built here: {why}. {WAY_OUT}")
        if done.returncode != 0:
            last = done.stderr[-ERROR_CHARS:].decode(errors="replace")
            raise ValueError(f"env.verifier.name=code: the sandbox's walls could not be tried: {last}. {WAY_OUT}")
        if open_walls := sorted(set(json.loads(rest))):
            raise ValueError(f"env.verifier.name=code: walls of the sandbox do not stand here: {open_walls}. {WAY_OUT}")


STANDING = b'{"standing": true}'
WAY_OUT = "Nothing a model writes is run without them: run elsewhere, or score with another verifier"


def _command() -> list[str]:
    """-I -S: nothing of the user's, no packages; only the standard library."""
    return [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(Path(__file__).with_name("sandbox_child.py"))]


def _environment(folder: str) -> dict[str, str]:
    """Nothing of this process's own, keys and tokens least of all, but where shared libraries are."""
    own = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
    return own | {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}


def _job(config: CodeVerifier, folder: str, source: str, tests: Tests | None, nonce: str) -> bytes:
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib"}
    job = {
        "source": source,
        "tests": tests,
        "nonce": nonce,
        "parent": os.getpid(),
        "folder": folder,
        "readable": [*sorted(library), *SYSTEM_PATHS],
        "memory_bytes": config.memory_bytes,
        "cpu_s": config.cpu_s,
        "file_bytes": config.file_bytes,
    }
    text = json.dumps(job).encode()
    return struct.pack(">Q", len(text)) + text


async def _feed(stdin: asyncio.StreamWriter, given: bytes) -> None:
    """A program need not read what it is given."""
    try:
        stdin.write(given)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except ConnectionError:
        pass


def _outcome(output: bytes, ended: str, nonce: str) -> Outcome:
    printed, _, verdict = output.rpartition(nonce.encode())
    said = re.fullmatch(rb" (\d{1,9})", verdict)  # else a thread of the program printed behind it
    return Outcome(ended, printed, int(said[1])) if said else Outcome(ended, output)


def _said(line: bytes) -> str:
    try:
        return str(json.loads(line)["missing"])
    except (ValueError, KeyError, TypeError):
        return ""
