"""The program inside a sandbox: it builds the walls around itself, then runs what a model wrote. Linux only.

Run as a script (`python -I -S`), imported by none; it may use the standard library alone. A job comes as 8 bytes of
length and JSON on stdin, what follows is the program's own stdin. The first line of stdout, written before any of the
model's code runs, says whether the walls stand: `{"standing": true}`, or the wall that does not and why.

Walls, each the kernel's, none undone by what runs inside (capabilities are dropped, no_new_privs is set):
    processes    seccomp: no fork, no exec, signals to itself only, no ptrace, namespaces, mounts, keys, io_uring
    network      seccomp: no socket(); Landlock too, where it knows TCP
    files        Landlock: reads Python's library and its own folder, writes its own folder, executes nothing;
                 seccomp: what Landlock does not know (owner, mode, times, attributes of files)
    memory, cpu, file size, open files: resource limits that cannot be raised again
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

# name: numbers on x86_64 and aarch64; 0 is not denied there because there is no such call (io_setup is 0 on aarch64)
DENIED = {
    "socket": (41, 198), "fork": (57, 0), "vfork": (58, 0), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "unshare": (272, 97), "setns": (308, 268),
    "chroot": (161, 51), "pivot_root": (155, 41), "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setgroups": (116, 159), "setresuid": (117, 147), "setresgid": (119, 149), "setfsuid": (122, 151),
    "setfsgid": (123, 152), "prctl": (157, 167), "personality": (135, 92), "setrlimit": (160, 164),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54), "utime": (132, 0),
    "utimes": (235, 0), "futimesat": (261, 0), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mknod": (133, 0), "mknodat": (259, 33), "truncate": (76, 45), "fallocate": (285, 47),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "semop": (65, 193), "semtimedop": (220, 192), "syslog": (103, 116),
    "sched_setaffinity": (203, 122), "modify_ldt": (154, 0), "sync": (162, 81), "syncfs": (306, 267),
    "semctl": (66, 191), "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_setup": (206, 0), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, 0),
    "ioperm": (173, 0), "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}  # fmt: skip
ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # their arguments lie in memory, unseen: callers have other ways
FIRST_UNKNOWN = 450  # what a later kernel may add is not there for a program in here
# Whose signals a file sends, and which; typing into a terminal: (call, its second argument)
SIGNALLING = (((72, 25), (8, 10, 15)), ((16, 29), (0x8901, 0x8902, 0x5412)))  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX
CLONE, OPEN, OPENAT, KILL, TGKILL, PRLIMIT = (56, 220), (2, 0), (257, 56), (62, 129), (234, 131), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit architecture
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, SECCOMP = 444, 445, 446, (317, 277)
READ_FILE, READ_DIR, WRITE_FILE, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # by ABI; later ones: 16 bits
EXECUTE, SPECIAL = 1, 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # device nodes, sockets, pipes
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
OPEN_FILES, STACK_BYTES = 64, 8 << 20

libc = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """A wall that cannot be built here: its name, and why."""


def main() -> NoReturn:
    """Build the walls, run the job, end."""
    job = json.loads(_read(struct.unpack(">Q", _read(8))[0]))
    try:
        build_walls(job)
    except Missing as missing:
        os.write(1, json.dumps({"missing": str(missing)}).encode() + b"\n")
        os._exit(1)
    os.write(1, b'{"standing": true}\n')
    os._exit(run(job["source"], job["tests"], job["nonce"]))


def run(source: str, tests: list[tuple[str, bool]] | None, nonce: str) -> int:
    """Run a program, then the tests against its names: how many passed is said behind the nonce. The exit code."""
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, "solution.py", "exec"), main_module.__dict__)
        if tests is not None:
            passed = run_tests(tests, main_module.__dict__)
            sys.stdout.flush()
            os.write(1, f"{nonce} {passed}".encode())
    except SystemExit as end:
        return int(tests is not None or end.code not in (None, 0))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def run_tests(tests: list[tuple[str, bool]], names: dict[str, Any]) -> int:
    """Run statements one after the other: how many of those that count passed. Any other must not fail."""
    passed = 0
    for statement, counts in tests:
        code = compile(statement, "tests.py", "exec")
        try:
            exec(code, names)
            passed += counts
        except Exception:
            if not counts:
                raise
            traceback.print_exc()
    return passed


def build_walls(job: dict[str, Any]) -> None:
    """All of them, or Missing. The order matters: each may need what the next one takes away."""
    if platform.machine() not in MACHINES:
        raise Missing(f"processes: system calls of {platform.machine()} are not known here, only {', '.join(MACHINES)}")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        os._exit(1)  # it ended before it could be asked to take this one with it
    os.chdir(job["folder"])
    limit_resources(job)
    _must("processes: no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _must("processes: dropping capabilities", libc.capset(header, nothing))
    restrict_files(job["folder"], job["readable"])
    restrict_calls()


def limit_resources(job: dict[str, Any]) -> None:
    """Hard limits, so that they hold."""
    for name, most in (
        ("AS", job["memory_bytes"]),
        ("CPU", job["cpu_s"]),
        ("FSIZE", job["file_bytes"]),
        ("NOFILE", OPEN_FILES),
        ("STACK", STACK_BYTES),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (OSError, ValueError) as error:
            raise Missing(f"resources: RLIMIT_{name}={most}: {error}") from error


def restrict_files(folder: str, readable: list[str]) -> None:
    """Landlock: everything that can be done with a path is denied, but for these."""
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        raise Missing(
            f"files: Landlock is not to be had ({os.strerror(ctypes.get_errno())}): it takes Linux 5.13 or later with"
            " Landlock enabled, and a container that lets it through"
        )
    handled = FILE_RIGHTS.get(abi, (1 << 16) - 1)
    attribute = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attribute = attribute[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _must("files: Landlock ruleset", libc.syscall(LANDLOCK_CREATE, attribute, len(attribute), 0))
    inside = handled & ~(EXECUTE | SPECIAL)
    for path, rights in ((folder, inside), *((path, READ_FILE | READ_DIR) for path in readable)):
        _allow(ruleset, path, rights)
    for device in ("/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(ruleset, device, READ_FILE)
    _allow(ruleset, "/dev/null", handled & (READ_FILE | WRITE_FILE | TRUNCATE))
    _must("files: Landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= READ_FILE | WRITE_FILE | TRUNCATE
    rule = struct.pack("=Qi", rights, handle)
    _must(f"files: Landlock rule for {path}", libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
    os.close(handle)


def restrict_calls() -> None:
    """seccomp: a filter over the numbers of system calls, and over the flags of a few."""
    column, architecture = MACHINES[platform.machine()]
    filters = calls_filter(column, architecture, os.getpid())
    array = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(filters), ctypes.addressof(array))
    _must("processes: seccomp", libc.syscall(SECCOMP[column], 1, 1, ctypes.byref(program)))  # all threads


def calls_filter(column: int, architecture: int, pid: int) -> list[tuple[int, int, int, int]]:
    """The filter as BPF: (code, jump if true, jump if false, operand)."""
    load, equal, at_least, mask, end = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, deny, absent, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000

    def argument(number: int) -> int:
        """Where its lower half lies; both machines are little-endian."""
        return 16 + 8 * number

    filters = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    filters += [(at_least, 0, 1, FIRST_UNKNOWN), (end, 0, 0, absent)]  # x32 calls of x86_64 are above too
    for numbers, verdict in ((DENIED, deny), (ABSENT, absent)):
        for number in (pair[column] for pair in numbers.values() if pair[column]):
            filters += [(equal, 0, 1, number), (end, 0, 0, verdict)]
    thread, truncates, how = 0x10000, os.O_TRUNC, os.O_ACCMODE | os.O_TRUNC
    # A call that is allowed if an argument, masked, is a value, or if it is not: (call, argument, mask, value, is)
    for call, number, bits, value, wanted in (
        (CLONE, 0, thread, thread, True),
        (KILL, 0, 0xFFFFFFFF, pid, True),
        (TGKILL, 0, 0xFFFFFFFF, pid, True),
        (OPEN, 1, how, truncates, False),  # empties a file that may only be read: older Landlocks let it pass
        (OPENAT, 2, how, truncates, False),
    ):
        if call[column]:
            filters += [(equal, 0, 5, call[column]), (load, 0, 0, argument(number)), (mask, 0, 0, bits)]
            filters += [(equal, 1 - wanted, wanted, value), (end, 0, 0, allow), (end, 0, 0, deny)]
    for call, values in SIGNALLING:
        filters += [(equal, 0, 2 + 2 * len(values), call[column]), (load, 0, 0, argument(1))]
        for value in values:
            filters += [(equal, 0, 1, value), (end, 0, 0, deny)]
        filters.append((end, 0, 0, allow))
    # Reading a limit is a prlimit without a new one.
    filters += [(equal, 0, 6, PRLIMIT[column]), (load, 0, 0, argument(2)), (equal, 0, 3, 0)]
    filters += [(load, 0, 0, argument(2) + 4), (equal, 0, 1, 0), (end, 0, 0, allow), (end, 0, 0, deny)]
    return [*filters, (end, 0, 0, allow)]


def _must(what: str, result: int) -> int:
    if result < 0:
        raise Missing(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _read(count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(0, count - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


if __name__ == "__main__":
    main()
