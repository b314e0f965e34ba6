"""The sandbox: every wall holds against a program that leans on it, and what is allowed works."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.config.env import CodeVerifier
from tandem.envs.sandbox import Sandbox
from tests.envs.asking import landlock_is_here

pytestmark = pytest.mark.skipif(not landlock_is_here(), reason="the sandbox needs Linux with Landlock")
CODE = CodeVerifier(name="code", cpu_s=1, timeout_s=60)


def run(source, config=CODE, **given):
    return asyncio.run(Sandbox(config).run(source, **given))


@pytest.mark.parametrize(
    "source",
    [
        "print('hello', input())",
        "import random, re, math, json, datetime, heapq, decimal, itertools\nprint('hello', input())",
        "import threading\nt = threading.Thread(target=lambda: print('hello', input()))\nt.start()\nt.join()",
        "import asyncio\nasync def main(): print('hello', input())\nasyncio.run(main())",
        "open('a', 'w').write('hello ' + input())\nimport os\nos.rename('a', 'b')\nprint(open('b').read())",
        "open('/dev/null', 'w').write('x')\nprint('hello', input())",
        "import sys\nprint('hello', sys.stdin.read().strip())\nsys.exit()",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: str\nprint(A('hello').x, input())",
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n  f.write('hello ')\n  f.seek(0)\n"
        "  print(f.read() + input())",
    ],
)
def test_a_program_can_compute_read_its_input_and_use_its_folder(source):
    outcome = run(source, stdin=b"there\n")
    assert (outcome.ended, outcome.output.decode().strip()) == ("", "hello there")


def test_the_network_is_out_of_reach():
    asked = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        for source in (
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/')",
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
            "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/x')",
            "import ctypes, os\nr = ctypes.CDLL(None).syscall(41 if os.uname().machine == 'x86_64' else 198, 2, 1, 0)\n"
            "assert r >= 0",
            "import ctypes\nassert ctypes.CDLL(None, use_errno=True).syscall(425, 8, bytes(120)) >= 0",  # io_uring
        ):
            assert run(source).ended == "exit code 1", source
        server.shutdown()
    assert asked == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True:\n  os.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import multiprocessing as m\np = m.Process(target=print)\np.start()\np.join()",
        "import os, sys\nos.execv(sys.executable, [sys.executable])",
        "import ctypes\nif ctypes.CDLL(None).syscall(57) < 0: raise OSError",
        "import ctypes\nif ctypes.CDLL(None).vfork() < 0: raise OSError",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGKILL)",
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) < 0: raise OSError",
        "import os\nos.setuid(12345)",
        "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import os\nos.sched_setaffinity(os.getppid(), {0})",
    ],
)
def test_a_fork_bomb_and_whatever_else_makes_or_ends_processes_fails_at_once(source):
    if "syscall(57)" in source and os.uname().machine != "x86_64":
        pytest.skip("this call has another number here")
    assert run(source).ended == "exit code 1"


def test_a_bomb_of_threads_ends_at_the_memory_limit():
    source = "import threading\nwait = threading.Event()\nwhile True:\n  threading.Thread(target=wait.wait).start()"
    assert run(source, CODE.model_copy(update={"timeout_s": 10.0})).ended != ""


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(8 << 30)",
        "x = []\nwhile True:\n  x.append(bytearray(1 << 24))",
        "import mmap\nmmap.mmap(-1, 8 << 30)",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(8 << 30)",
        "import os\nos.memfd_create('x')",
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) < 0: raise MemoryError",
    ],
)
def test_8_gib_cannot_be_had(source):
    patient = CODE.model_copy(update={"cpu_s": 60})  # pages are cleared at the program's expense
    assert run(source, patient).ended == "exit code 1"


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\nexcept ValueError: pass\n"
        "while True: pass",
        "9**9**9",
        "import re\nre.match('(a*)*b', 'a' * 60)",
    ],
)
def test_an_endless_loop_ends_with_its_cpu_time(source):
    assert run(source).ended == "exit code -9"


def test_a_program_that_waits_ends_with_its_wall_clock():
    outcome = run("import time\ntime.sleep(3600)", CODE.model_copy(update={"timeout_s": 0.5}))
    assert outcome.ended == "not done after timeout_s=0.5"


def test_endless_printing_is_cut():
    outcome = run("while True: print('x' * 1000)", CODE.model_copy(update={"output_bytes": 10_000}))
    assert outcome.ended == "printed more than output_bytes=10000"
    assert len(outcome.output) <= 10_000


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.listdir({home!r})",
        "open({secret!r}).read()",
        "import os\nos.listdir({outside!r})",
        "import os\nos.symlink({secret!r}, 'link')\nopen('link').read()",
        "import os\nos.link({secret!r}, 'link')\nopen('link').read()",
        "import os\nos.chdir({outside!r})\nos.listdir('.')",
        "open('/proc/self/environ').read()",
        "open('/etc/passwd').read()",
    ],
)
def test_the_home_directory_and_whatever_is_outside_cannot_be_read(source, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    source = source.format(home=str(Path.home()), secret=str(secret), outside=str(tmp_path))
    assert run(source).ended == "exit code 1"


@pytest.mark.parametrize(
    "source",
    [
        "open({outside!r} + '/new', 'w')",
        "open({secret!r}, 'w')",
        "open({secret!r}, 'a').write('x')",
        "import os\nos.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os\nos.truncate({secret!r}, 0)",
        "import os\nos.unlink({secret!r})",
        "import os\nos.rename({secret!r}, 'mine')",
        "import os\nos.chmod({secret!r}, 0o777)",
        "import os\nos.utime({secret!r}, (0, 0))",
        "import os\nos.mkdir({outside!r} + '/new')",
        "import os\nos.symlink({outside!r}, 'link')\nopen('link/new', 'w')",
        "open('/dev/shm/tandem-new', 'w')",
        "open('/tmp/tandem-new', 'w')",
    ],
)
def test_nothing_outside_its_folder_can_be_written(source, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    before = os.stat(secret)
    assert run(source.format(secret=str(secret), outside=str(tmp_path))).ended == "exit code 1"
    after = os.stat(secret)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "key"
    assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)


def test_a_file_has_a_limit_and_the_folder_is_gone_afterwards():
    outcome = run("import os\nprint(os.getcwd(), flush=True)\nopen('a', 'wb').write(bytes(2 << 20))")
    assert outcome.ended == "exit code 1"
    assert not Path(outcome.output.decode().strip()).exists()


def test_no_secret_of_the_run_is_in_the_programs_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-123")
    outcome = run("import os\nprint(sorted(os.environ))")
    assert "JUDGE_API_KEY" not in outcome.output.decode()


def test_a_cancelled_run_leaves_no_process_and_no_folder():
    async def cancelled():
        sandbox = Sandbox(CODE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.run("import time\ntime.sleep(3600)")

    before = children()
    asyncio.run(cancelled())
    assert children() == before


def children():
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "sandbox_child" in line]


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    script = (
        "import asyncio, os\nfrom tandem.config.env import CodeVerifier\nfrom tandem.envs.sandbox import Sandbox\n"
        "async def main():\n"
        "  sandbox = Sandbox(CodeVerifier(name='code', timeout_s=600))\n"
        "  run = asyncio.ensure_future(sandbox.run('import time\\ntime.sleep(3600)'))\n"
        "  while not (mine := [p for p in os.listdir('/proc') if p.isdigit() and parent(p) == os.getpid()]):\n"
        "    await asyncio.sleep(0)\n"
        "  print(mine[0], flush=True)\n"
        "  await run\n"
        "def parent(pid):\n"
        "  try:\n    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "  except OSError:\n    return 0\n"
        "asyncio.run(main())"
    )
    place = os.environ | {"TMPDIR": str(tmp_path)}  # whoever is killed leaves its folder
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=place) as owner:
        pid = int(owner.stdout.readline())
        handle = os.pidfd_open(pid)
        owner.kill()
    asyncio.run(ended(handle))


async def ended(handle):
    done = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, done.set)  # readable once the process has ended
    async with asyncio.timeout(60):
        await done.wait()
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)


@pytest.mark.parametrize(("platform", "said"), [("darwin", "this is darwin"), ("win32", "this is win32")])
def test_elsewhere_than_on_linux_it_is_refused_by_name(monkeypatch, platform, said):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ValueError, match=f"name=code .*{said}"):
        Sandbox(CODE)


def test_a_wall_that_cannot_be_built_is_named(monkeypatch, tmp_path):
    """As in a container that does not let Landlock through: seccomp answers for the kernel."""
    script = (
        "import ctypes, struct, sys\n"
        "rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7FFF0000)]\n"
        "array = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *r) for r in rules))\n"
        "program = struct.pack('HxxxxxxP', len(rules), ctypes.addressof(array))\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0\n"
        "from tandem.config.env import CodeVerifier\nfrom tandem.envs.sandbox import Sandbox\n"
        "Sandbox(CodeVerifier(name='code'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (
        "ValueError: env.verifier.name=code: a wall of the sandbox cannot be built here: files: Landlock" in done.stderr
    )


def test_a_wall_that_is_built_but_does_not_hold_is_named(monkeypatch):
    """The library's folders are readable; were the home directory among them, the probe would see it."""
    monkeypatch.setattr("tandem.envs.sandbox.SYSTEM_PATHS", ("/lib", "/lib64", "/usr/lib", str(Path.home())))
    with pytest.raises(ValueError, match=r"do not stand here: \['reading the home directory'\]"):
        Sandbox(CODE)
