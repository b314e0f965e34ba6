"""`tandem drill`: the run without a fault, then with each fault, in processes and directories of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config import Config
from tandem.config.env import PythonEnv
from tandem.config.load import load
from tandem.launch.drill.evidence import Ended, Verdict, code, judge, newest_step
from tandem.launch.drill.faults import FAULTS, Fault, Scene
from tandem.launch.run_dir import choose_run_dir
from tandem.launch.session import train

STEPS, PROMPTS, SAMPLES = 3, 4, 2
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.2  # between two looks at whether a drill is to end
SMALL = (
    *("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.resume=auto"),
    *("checkpointing.checkpoint_must_save_by=null", "logger.console=silent", "logger.tensorboard=false"),
    *("logger.timeline=false", "logger.wandb=null", "logger.mlflow=null", "logger.flight_recorder={}"),
)


@dataclass(frozen=True)
class Drill:
    """One recipe, small, and where its runs are."""

    recipe: str
    overrides: tuple[str, ...]
    config: Config
    directory: Path
    limit_s: float

    def run(self, name: str, fault: Fault | None) -> Ended:
        """Run it, and go on with it where a fault has ended it."""
        run_dir = self.directory / name
        overrides = [*self.overrides, *(fault.settings(self.config) if fault else ()), f"run_dir={run_dir}"]
        command = ["drill-run", name] if fault else ["train"]
        ended = self._process(run_dir, "said.txt", [*command, self.recipe, *overrides])
        if fault is None or ended.code == 0:
            return ended
        went_on = self._process(run_dir, "said-2.txt", ["train", str(run_dir)])
        return replace(ended, code_of_next=went_on.code, said=went_on.said or ended.said)

    def _process(self, run_dir: Path, file: str, arguments: Sequence[str]) -> Ended:
        """What it prints goes into a file of the run."""
        run_dir.mkdir(exist_ok=True)
        said = run_dir / file
        with said.open("wb") as out:
            code = run_alone([sys.executable, "-m", "tandem", *arguments], out, self.limit_s)
        errors = [line for line in said.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        return Ended(run_dir, code, newest_step(run_dir), said=errors[-1] if errors else "")


def run_alone(command: Sequence[str], out: IO[bytes], limit_s: float) -> int | None:
    """The exit code of a command, or None past its time. It leaves no process, whatever ends it.

    It has a session of its own, which also keeps the Ctrl-C of a terminal from it: the drill ends it then.
    """
    ends = time.monotonic() + limit_s
    with held_back() as came:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not came and time.monotonic() < ends:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(LOOK_S)
        finally:
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None


@contextmanager
def held_back() -> Generator[list[int]]:
    """Ctrl-C and what else ends a drill raise KeyboardInterrupt after the block only. Gives those that have come.

    An interrupted Popen would leave a process that nobody knows, or keep a lock that its next wait() needs.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in ENDING
        if callable(signal.getsignal(number))  # neither ignored nor left to the system
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def ends_tidily() -> Generator[None]:
    """SIGTERM and a closed terminal end a drill as Ctrl-C does, so that its run ends with it."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drill(recipe: str, overrides: Sequence[str], *, only: Sequence[str], limit_s: float, console: Console) -> int:
    """Run a recipe under each fault, or `only` some. 0 where all promises were kept, else 1. ValueError: bad input."""
    unknown = [name for name in only if name not in FAULTS]
    if unknown:
        raise ValueError(f"no fault {unknown[0]!r}: give one of {', '.join(FAULTS)}")
    rehearsal = prepare(recipe, overrides, limit_s)
    console.print(f"the drill of {recipe} in {rehearsal.directory}\nas {' '.join(rehearsal.overrides)}", soft_wrap=True)
    verdicts: list[Verdict] = []
    try:
        with ends_tidily():
            whole = whole_run(rehearsal, console)
            verdicts.extend(try_all(rehearsal, [name for name in FAULTS if name in only or not only], whole, console))
    except KeyboardInterrupt:
        text = f"interrupted after {len(verdicts)} faults; their runs are in {rehearsal.directory}"
        console.print(text, soft_wrap=True, highlight=False)
        raise
    console.print(table_of(verdicts))
    return conclude(verdicts, console)


def whole_run(rehearsal: Drill, console: Console) -> Ended:
    """The run without a fault. RuntimeError where it does not end well."""
    console.print("without a fault ...", style="dim")
    whole = rehearsal.run("whole", None)
    if whole.code != 0:
        raise RuntimeError(
            f"the run without a fault ended with {code(whole.code)}: {whole.said}; see {whole.run_dir / 'said.txt'}, "
            "and mend that first"
        )
    return whole


def try_all(rehearsal: Drill, names: Sequence[str], whole: Ended, console: Console) -> Iterator[Verdict]:
    """One fault after the other."""
    same = has_bits(rehearsal.config)
    for name in names:
        fault = FAULTS[name]
        if fault.of_scorer and isinstance(rehearsal.config.env, PythonEnv):
            console.print(f"{name}: not tried: env.name=python scores its samples itself")
            continue
        settings = fault.settings(rehearsal.config)
        console.print(" ".join([name, *settings, "..."]), style="dim")
        yield judge(name, fault, rehearsal.run(name, fault), rehearsal.config, whole if same else None)


def run_with(name: str, recipe: str, overrides: Sequence[str]) -> int:
    """One process of a drill: `tandem train`, with a fault in it."""
    loaded = load(recipe, overrides)
    assert loaded.config.run_dir is not None, "the drill gives one"
    return train(loaded, FAULTS[name].cast(Scene(loaded.config, Path(loaded.config.run_dir))))


def prepare(recipe: str, overrides: Sequence[str], limit_s: float) -> Drill:
    """The recipe in its small form. ValueError where that, or what is overridden, is not right."""
    given = load(recipe, overrides).config
    small = (
        *SMALL,
        *sizes(given),
        *(change for change in overrides if not change.startswith("run_dir=")),
    )
    config = load(recipe, small).config
    if config.algorithm.max_num_steps < (least := steps_in_house(config) + 1):
        raise ValueError(
            f"{config.algorithm.max_num_steps} steps are too few for a drill of {recipe}: take {least} or more; its "
            f"faults wait for the first checkpoint, and by then the prompts of {least - 1} may have been begun"
        )
    if config.logger.flight_recorder is None:
        raise ValueError("a drill reads in flight records which prompts were trained: take logger.flight_recorder back")
    if config.cluster.launch == "ray" and config.cluster.ray.address is not None:
        raise ValueError(
            f"cluster.ray.address={config.cluster.ray.address}: a drill kills processes of its own Ray only: set "
            "cluster.ray.address=null"
        )
    directory = choose_run_dir(given.run_dir, f"drill-{given.name}").resolve()
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"run_dir={directory} is not empty: a drill makes a new directory; give another")
    directory.mkdir(parents=True, exist_ok=True)
    return Drill(recipe, small, config, directory, limit_s)


def steps_in_house(config: Config) -> int:
    """How many steps' prompts may have been begun before the first step is saved: 1 with lead 0."""
    groups, sampler = config.algorithm.num_prompts_per_step, config.async_rl.sampler
    return max(ceil(sampler.tickets(groups, left) / groups) for left in (0, config.policy_training_start_step))


def sizes(config: Config) -> list[str]:
    """A few small steps, more with a longer lead; a size that is smaller already stays."""
    section, algorithm = "ppo" if config.ppo else "grpo", config.algorithm
    prompts, samples = min(algorithm.num_prompts_per_step, PROMPTS), min(algorithm.num_generations_per_prompt, SAMPLES)
    reduced: dict[str, int] = {"num_prompts_per_step": prompts}
    if config.policy_training_start_step > 1:
        reduced["policy_training_start_step"] = 1
    small = config.model_copy(update={section: algorithm.model_copy(update=reduced)})
    changes = [
        f"{section}.max_num_steps={STEPS - 1 + steps_in_house(small)}",
        f"{section}.num_prompts_per_step={prompts}",
        f"{section}.num_generations_per_prompt={samples}",
        f"policy.train_global_batch_size={max(1, prompts * samples // 2)}",
    ]
    if config.data.validation is not None:  # at the end, when no fault is to come any more
        changes += [f"{section}.val_at_start=false", f"{section}.val_period=0", f"{section}.val_at_end=true"]
        changes.append(f"{section}.max_val_samples=2")
    if "policy_training_start_step" in reduced:
        changes.append("ppo.policy_training_start_step=1")
    if (config.async_rl.min_groups_for_streaming_train or 0) > prompts:
        changes.append(f"async_rl.min_groups_for_streaming_train={prompts}")
    models = {"policy": config.policy, "value": config.value}
    return changes + [
        f"{name}.scheduler.warmup_steps=1"
        for name, model in models.items()
        if model is not None and model.scheduler.warmup_steps > 1
    ]


def has_bits(config: Config) -> bool:
    """Whether a run that was disturbed ends with the bits of one that was not: lead 0, on a CPU, in float32."""
    on_cpu = config.cluster.device == "cpu" or (config.cluster.device == "auto" and not torch.cuda.is_available())
    models = [config.policy, *([config.value] if config.value else [])]
    return on_cpu and not config.generates_while_training and all(model.precision == "float32" for model in models)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """A row a fault. `bits`: of weights, optimizers and metrics, against the run without a fault."""
    table = Table("fault", "what happened", "what the run did", "prompts", "bits", "promises")
    for verdict in verdicts:
        kept = Text("broken", "red") if verdict.broken else Text("kept", "green")
        texts = (verdict.fault, verdict.happened, verdict.did, verdict.prompts, verdict.bits)
        table.add_row(*map(Text, texts), kept)
    return table


def conclude(verdicts: Sequence[Verdict], console: Console) -> int:
    """Which promises were broken, and the exit code."""
    for verdict in verdicts:
        for what in verdict.broken:
            console.print(Text(f"{verdict.fault}: {what}", "red"), soft_wrap=True)
    if any(verdict.broken for verdict in verdicts):
        return 1
    console.print("every promise was kept")
    return 0
