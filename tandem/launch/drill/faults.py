"""The faults: each happens once, for real, inside a run, and leaves a note of what it did."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.config import Config
from tandem.config.env import PythonEnv
from tandem.control import vault
from tandem.launch.cast import Cast
from tandem.launch.drill.watched import WatchedEngine, WatchedTrainer, WatchedVerifier
from tandem.launch.run_dir import append_record
from tandem.roles import Engine, Trainer
from tandem.types import Prompt, RolloutFailed

NOTE = "fault.jsonl"  # in the run's directory
HOLD_S, HOLD_TIMES = 3.0, 10.0  # a straggler takes so long, or so many times what the slowest response took
SCORE_S = 2.0  # how soon a scorer that hangs is given up, where the recipe waits longer


@dataclass(frozen=True)
class Scene:
    """The run in which a fault happens once: after its first step, when there is a first checkpoint to lose."""

    config: Config
    run_dir: Path

    def happens(self, says: str) -> bool:
        """Whether it happens now; then it is noted, before it happens: a kill leaves no time for it later."""
        note = self.run_dir / NOTE
        if note.exists() or not vault.marked(self.run_dir / "checkpoints"):
            return False
        append_record(note, {"says": says})
        return True

    @property
    def request(self) -> int:
        """The number of a request of the second step, where every sample has one turn."""
        return self.config.algorithm.samples_per_step + 2


@dataclass(frozen=True)
class Fault:
    """`codes` are exit codes that a run may end with; it is gone on with where that is not 0.

    `passes`: it is over when the same is tried again, so that no prompt may be given up for it.
    """

    cast: Callable[[Scene], Cast]
    codes: tuple[int, ...]
    passes: bool = True
    of_scorer: bool = False
    hangs: bool = False

    def settings(self, config: Config) -> tuple[str, ...]:
        """What is overridden for this fault alone."""
        if self.hangs and not isinstance(config.env, PythonEnv) and config.env.score_timeout_s > SCORE_S:
            return (f"env.score_timeout_s={SCORE_S:g}",)
        return ()


def straggler(scene: Scene) -> Cast:
    """One response takes far longer than all others, within the deadline of the recipe."""

    async def before(request: int, slowest_s: float) -> None:
        held_s = min(max(HOLD_S, HOLD_TIMES * slowest_s), scene.config.policy.generation.timeout_s / 2)
        if request >= scene.request and scene.happens(f"request {request} was held back for {held_s:.1f} s"):
            await asyncio.sleep(held_s)

    return Cast(engine=lambda engine: WatchedEngine(engine, before))


def dead_engine(scene: Scene) -> Cast:
    """An engine ends in the middle of its requests: its process is killed, or, in one process, its thread ends."""
    remote = scene.config.cluster.launch == "ray"

    def around(engine: Engine) -> Engine:
        async def before(request: int, slowest_s: float) -> None:
            how = "the process of an engine was killed" if remote else "the engine was ended"
            if request < scene.request or not scene.happens(f"{how} at request {request}"):
                return
            if remote:
                os.kill(processes("EngineProcess")[0], signal.SIGKILL)
            else:
                await engine.close()

        return WatchedEngine(engine, before)

    return Cast(engine=around)


def scorer_error(scene: Scene) -> Cast:
    """The scorer cannot score one response."""

    async def before(prompt: Prompt) -> None:
        second = prompt.index >= scene.config.algorithm.num_prompts_per_step
        if second and scene.happens(f"a response to prompt {prompt.id!r} could not be scored"):
            raise RolloutFailed(f"prompt {prompt.id!r}: the drill's scorer error")

    return Cast(verifier=lambda verifier: WatchedVerifier(verifier, before))


def hung_scorer(scene: Scene) -> Cast:
    """The scorer does not answer for one response."""

    async def before(prompt: Prompt) -> None:
        second = prompt.index >= scene.config.algorithm.num_prompts_per_step
        if second and scene.happens(f"the score of a response to prompt {prompt.id!r} never came"):
            await asyncio.Event().wait()  # nobody sets it: the recipe's deadline ends the wait

    return Cast(verifier=lambda verifier: WatchedVerifier(verifier, before))


def full_disk(scene: Scene) -> Cast:
    """From the second checkpoint on no file may grow past half of the first one's largest."""

    def before_saving() -> None:
        whole = vault.marked(scene.run_dir / "checkpoints")
        size = max((file.stat().st_size for path in whole for file in path.rglob("*")), default=0) // 2
        if scene.happens(f"the disk took no more than {size:,} bytes of a file, while the second checkpoint was saved"):
            for process in (os.getpid(), *processes("TrainerRank")):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, size))

    return Cast(actor=lambda trainer: WatchedTrainer(trainer, lambda: None, before_saving))


def killed_trainer(scene: Scene) -> Cast:
    """kill -9 while the actor learns: of the run's process, or of a rank's."""
    remote = scene.config.cluster.launch == "ray"

    def before_learning() -> None:
        if scene.happens("kill -9 of " + ("a rank of the actor" if remote else "the run") + ", as the actor learned"):
            os.kill(processes("TrainerRank")[0] if remote else os.getpid(), signal.SIGKILL)

    def around(trainer: Trainer) -> Trainer:
        return WatchedTrainer(trainer, before_learning, lambda: None)

    return Cast(actor=around)


FAULTS = {
    "straggler": Fault(straggler, codes=(0,)),
    "dead_engine": Fault(dead_engine, codes=(0, 1)),
    "scorer_error": Fault(scorer_error, codes=(0,), passes=False, of_scorer=True),
    "hung_scorer": Fault(hung_scorer, codes=(0,), of_scorer=True, hangs=True),
    "full_disk": Fault(full_disk, codes=(1,)),
    "killed_trainer": Fault(killed_trainer, codes=(-signal.SIGKILL, 1)),
}


def processes(kind: str) -> list[int]:
    """The processes of a kind that Ray has started for this run: those below this process."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        names[int(folder.name)] = command

    def is_below(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return sorted(process for process, name in names.items() if name.startswith(f"ray::{kind}") and is_below(process))
