"""What a run directory proves: which prompts were trained, which are named, and the bits that the run ended with."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config import Config
from tandem.control import vault
from tandem.control.checkpoint import STATE
from tandem.control.flight_recorder import read_step, recorded
from tandem.launch.drill.faults import NOTE, Fault
from tandem.launch.run_dir import FLIGHT, UNTRAINED

FAILED = ("data_failure", "infrastructure_failure")
# What the clock decides, and how often something had to be tried: it differs where nothing else does.
BY_CLOCK = ("time/", "speed/", "buffer/", "gpu/", "health/", "rollout/retries")
BY_CLOCK_ENDS = ("_s", "/tflops", "/mfu")


@dataclass(frozen=True)
class Ended:
    """How the processes of one run ended. `step` is the newest whole checkpoint's when the first had ended."""

    run_dir: Path
    code: int | None  # None: it had to be ended
    step: int
    code_of_next: int | None = 0  # of the process that went on, where there was one
    said: str = ""  # the last error that was printed


@dataclass(frozen=True)
class Accounts:
    """Every prompt that was begun, once."""

    begun: int
    trained: Counter[int]
    named: Mapping[int, Mapping[str, Any]]  # in untrained.jsonl
    held: frozenset[int]  # by the last checkpoint: a run that goes on has them

    @property
    def lost(self) -> list[int]:
        """Begun, and nowhere."""
        return [i for i in range(self.begun) if not (self.trained[i] or i in self.named or i in self.held)]

    @property
    def twice(self) -> list[int]:
        """Trained more than once, or trained and named or held as well."""
        return [i for i, times in self.trained.items() if times > 1 or i in self.named or i in self.held]

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Given up for a failure."""
        return [record for record in self.named.values() if record["why"] in FAILED]


@dataclass(frozen=True)
class Verdict:
    """What a run did about a fault, and which promises it broke: none, if it is well."""

    fault: str
    happened: str
    did: str
    prompts: str
    bits: str
    broken: tuple[str, ...] = field(default=())


def accounts_of(run_dir: Path) -> Accounts:
    """From the flight records, untrained.jsonl and the newest checkpoint of a run that has ended."""
    trained = Counter(group.index for place in recorded(run_dir / FLIGHT) for group in read_step(place).groups)
    named = {record["index"]: record for record in lines_of(run_dir / UNTRAINED)}
    newest = max(vault.marked(run_dir / "checkpoints"), default=None)
    if newest is None:
        return Accounts(0, trained, named, frozenset())
    state = json.loads((newest / STATE).read_text())["controller"]
    return Accounts(
        state["producer"]["next_index"], trained, named, frozenset(entry["index"] for entry in state["buffer"])
    )


def judge(name: str, fault: Fault, ended: Ended, config: Config, whole: Ended | None) -> Verdict:
    """Hold a run against its promises. `whole` is the run without a fault, where the same bits are promised."""
    accounts, notes = accounts_of(ended.run_dir), lines_of(ended.run_dir / NOTE)
    trained, wanted = steps_of(ended.run_dir), config.algorithm.max_num_steps
    broken = [] if notes else ["the fault did not happen"]
    if ended.code not in fault.codes:
        broken.append(f"it ended with {code(ended.code)}, not {' or '.join(map(code, fault.codes))}: {ended.said}")
    if ended.code and ended.code_of_next != 0:
        broken.append(f"it could not be gone on with: {code(ended.code_of_next)}: {ended.said}")
    if ended.code and not ended.step:
        broken.append("no whole checkpoint was left")
    if [record["step"] for record in trained] != list(range(1, wanted + 1)):
        broken.append(f"steps {[record['step'] for record in trained]} were trained, not 1 to {wanted}")
    if accounts.lost:
        broken.append(f"prompts {accounts.lost} were lost: neither trained nor named")
    if accounts.twice:
        broken.append(f"prompts {accounts.twice} were trained twice, or named as untrained too")
    given_up = accounts.failed
    if given_up and (fault.passes or len(given_up) > 1):
        broken.append(f"{'; '.join(map(named, given_up))}: given up for a fault that had passed")
    bits = "not promised"
    if whole is not None and not broken and not given_up:
        broken += differences(ended.run_dir, whole.run_dir)
        bits = "others" if broken else "the same"
    happened = notes[0]["says"] if notes else ""
    return Verdict(name, happened, what_it_did(ended, accounts), prompts(accounts), bits, tuple(broken))


def what_it_did(ended: Ended, accounts: Accounts) -> str:
    """In words, from what it left."""
    retries = sum(int(record.get("rollout/retries", 0)) for record in steps_of(ended.run_dir))
    did = [f"tried {retries} rollout{'s' * (retries > 1)} again"] if retries else []
    did += [f"gave up {named(record)}" for record in accounts.failed]
    if ended.code:
        kept = f"step {ended.step} is whole" if ended.step else "no checkpoint"
        did.append(f"ended with {code(ended.code)}; {kept}; gone on with from there")
    return "; ".join(did or ["went on"])


def prompts(accounts: Accounts) -> str:
    """Where they are."""
    parts = [f"{accounts.begun} begun", f"{sum(accounts.trained.values())} trained"]
    reasons = Counter(str(record["why"]) for record in accounts.named.values())
    parts += [f"{count} named ({why})" for why, count in reasons.items()]
    parts += [f"{len(accounts.held)} held"] * bool(accounts.held)
    return ", ".join([*parts, f"{len(accounts.lost)} lost"])


def named(record: Mapping[str, Any]) -> str:
    """A prompt of untrained.jsonl."""
    return f"prompt {record['id']!r} ({record['why']})"


def code(number: int | None) -> str:
    """An exit code in words."""
    if number is None:
        return "no end within its time"
    return f"signal {signal.Signals(-number).name}" if number < 0 else f"code {number}"


def differences(run_dir: Path, whole: Path) -> list[str]:
    """What the end of a run has other than the run without a fault: weights, optimizers, any metric of any step."""
    found = []
    theirs = weights_of(whole)
    wrong = [name for name, record in weights_of(run_dir).items() if theirs.get(name) != record]
    if wrong:
        found.append(f"other weights than without the fault: {', '.join(wrong)}")
    for ours, other in zip(steps_of(run_dir), steps_of(whole), strict=True):
        names = [name for name in ours.keys() | other.keys() if ours.get(name) != other.get(name)]
        if names := sorted(name for name in names if not by_clock(name)):
            found.append(f"step {ours['step']}: another {', '.join(names[:5])} than without the fault")
    return found


def by_clock(name: str) -> bool:
    """Whether a metric measures time."""
    return name.startswith(BY_CLOCK) or name.endswith(BY_CLOCK_ENDS)


def weights_of(run_dir: Path) -> dict[str, vault.FileRecord]:
    """The hashes of what the last checkpoint keeps of the models."""
    files = vault.verified(max(vault.marked(run_dir / "checkpoints"))).files
    return {name: record for name, record in files.items() if name.startswith(("actor/", "critic/"))}


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every trained step; validations are records of their own."""
    return [record for record in lines_of(run_dir / "metrics.jsonl") if "rollout/reward" in record]


def newest_step(run_dir: Path) -> int:
    """Of the newest checkpoint that is as it was written; 0 where there is none."""
    try:
        newest = vault.newest_verified(run_dir / "checkpoints")
    except ValueError:  # there are some, and none is as it was written
        return 0
    return vault.verified(newest).step if newest else 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, if it is there. A last line that a kill has torn is none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]
