"""Runs a case to its end: lives that are killed, or end by a fault, go on from the last checkpoint."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.controller import Controller
from tandem.control.samplers import build_sampler
from tandem.plane.memory import MemoryPlane
from tandem.simulation.engines import SimulatedEngines
from tandem.simulation.loop import SimulationDeadlock, run_virtual
from tandem.simulation.rollouts import SimulatedPrompts, SimulatedRollOut
from tandem.simulation.run import rollout_times, train_times
from tandem.simulation.training import OwnDevices, SimulatedAlgorithm, SimulatedSync
from tandem.types import Group, Metrics
from tests.simulation.cases import Case
from tests.simulation.world import Books, Killed, Saved, Violation, WatchedAlgorithm, WatchedRollOut, World

MAX_LIVES = 12
BUDGETS = ("max_skipped_prompts", "max_consecutive_dropped_prompts", "dynamic_sampling_max_gen_batches")
SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
GROUPS = TypeAdapter(list[Group])


class Parts:
    """The real parts that a planted bug replaces."""

    buffer: type[Buffer] = Buffer
    controller: type[Controller] = Controller
    sampler: Callable = staticmethod(build_sampler)


class NoClock:
    """Spans of simulated parts are measured elsewhere."""

    def span(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def drain(self) -> Metrics:
        return {}


def run_case(case: Case, parts: type[Parts] = Parts) -> World:
    """All lives of a case. Raises Violation."""
    world = World(case)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        for _ in range(MAX_LIVES):
            if run_life(world, parts, Path(scratch)):
                return world
    raise Violation(f"still not at an end after {MAX_LIVES} lives")


def run_life(world: World, parts: type[Parts], scratch: Path) -> bool:
    """One life; True if it has come to the end that its case asks for."""
    world.alive = False
    try:
        run_virtual(live(world, parts, scratch), watch=lambda: world.watch() if world.alive else None)
    except Killed:
        world.endings.append("killed")
        return False
    except SimulationDeadlock as error:
        raise Violation(f"deadlock: {error}") from error
    except BaseExceptionGroup as errors:
        return explained(first_of(errors), world)
    if world.controller.stopped and not complete(world):
        return stopped_rightly(world)
    check_end(world)
    return True


def stopped_rightly(world: World) -> bool:
    """A run that was asked to stop has saved its last step, and goes on from there."""
    world.demand(not world.suspicion, world.suspicion)
    saved = len(world.saved.books.trained) if world.saved else 0
    steps = world.controller.step
    world.demand(saved == steps, f"stopped after step {steps}, the newest checkpoint is of step {saved}")
    world.check_every_prompt()
    world.endings.append("stopped")
    return False


def explained(error: BaseException, world: World) -> bool:
    """Whether an error is the end that this case must come to; False: it goes on from its checkpoint."""
    text = str(error)
    named = next((name for name in BUDGETS if name in text and isinstance(error, ValueError)), "")
    if named:
        world.demand(named in world.exceeded, f"ended by {text!r}, but {world.exceeded} are exceeded")
        world.endings.append(named)
        return True
    if isinstance(error, RuntimeError) and "stall_timeout_s" in text:
        world.demand(bool(world.hanging) and world.case.work.timeout_s is None, f"nothing hangs, yet: {text}")
        world.endings.append("stalled")
        return False
    if isinstance(error, KeyError) and "the plane has no row" in text:
        world.demand(bool(world.lost_rows), f"no row was lost, yet: {text}")
        world.endings.append("lost row")
        return False
    raise Violation(f"life {world.life}, round {world.rounds}: {type(error).__name__}: {text}") from error


async def live(world: World, parts: type[Parts], scratch: Path) -> None:
    """From the last checkpoint to the end."""
    case, plane = world.case, MemoryPlane()
    plan, groups = case.plan_of_life(world.life + 1), dict[int, Group]()
    engines = SimulatedEngines(
        engines=case.machines.engines, slots=case.machines.slots, tokens_per_s=case.machines.tokens_per_s
    )
    roll_out = SimulatedRollOut(rollout_times(case.machines, case.work), engines=engines, plane=plane, fate=world.fate)
    algorithm = SimulatedAlgorithm(train_times(case.machines), plane=plane)
    controller = parts.controller(
        plan,
        algorithm=WatchedAlgorithm(algorithm, world, groups),
        dataset=SimulatedPrompts(case.work.prompts_per_epoch),
        roll_out=WatchedRollOut(roll_out, world),
        buffer=parts.buffer(parts.sampler(plan.async_rl.sampler)),
        plane=plane,
        sync=SimulatedSync(engines, seconds=case.machines.publish_s, pause=plan.async_rl.pause),
        gpus=OwnDevices(),
        evaluate=evaluation(case),
        save=Saving(world, plane, scratch).save,
        clock=NoClock(),
        sinks=[],
        accounts=Accounts(world.account),
        health=None,
        recorder=None,
    )
    if world.saved:
        state = json.loads(world.saved.state)
        await plane.load(world.saved.rows)
        controller.restore(state)
        kept = [entry["group"] for entry in state["buffer"] if entry["group"]]
        groups |= {group.index: group for group in GROUPS.validate_python(kept)}
    world.begin(controller)
    world.groups = groups
    async with asyncio.TaskGroup() as beside:
        later = [beside.create_task(crash(engines, moment_s, case)) for moment_s in case.crashes_s]
        await controller.run()
        for task in later:
            task.cancel()


async def crash(engines: SimulatedEngines, moment_s: float, case: Case) -> None:
    """An engine dies at this time."""
    await asyncio.sleep(moment_s)
    engines.crash(int(moment_s) % case.machines.engines)


def evaluation(case: Case) -> Callable[[int, Callable[[], None]], Awaitable[Metrics]] | None:
    seconds = case.evaluate_s
    if seconds is None:
        return None

    async def evaluate(step: int, moved: Callable[[], None]) -> Metrics:
        await asyncio.sleep(seconds)
        return {}

    return evaluate


class Saving:
    """As Checkpoints.save: the state of this moment, there once it is written; beside the loop where the case says."""

    def __init__(self, world: World, plane: MemoryPlane, scratch: Path) -> None:
        self._world = world
        self._plane = plane
        self._scratch = scratch
        self._writing: asyncio.Task[None] | None = None

    async def save(self, controller: Controller) -> None:
        if self._writing is not None:
            await self._writing
        write = await self._snapshot(controller)
        if self._world.case.saves_beside:
            self._writing = controller.beside(write())
        else:
            await write()

    async def _snapshot(self, controller: Controller) -> Callable[[], Coroutine[Any, Any, None]]:
        world = self._world
        state, books = json.dumps(controller.state()), copy.deepcopy(world.books)
        world.demand(controller.step == len(books.trained), f"saved at step {controller.step} of {len(books.trained)}")
        rows = self._scratch / f"{world.life}_{controller.step}"
        keys = [key for group in controller.buffer.finished() for key in group.keys]
        write_rows = await self._plane.snapshot(keys)

        async def write() -> None:
            write_rows(rows)
            await asyncio.sleep(world.case.save_s)
            world.saved = Saved(state, rows, books)

        return write


def complete(world: World) -> bool:
    """Whether nothing is left to do: all steps, or all data."""
    controller = world.controller
    return controller.step == world.plan.max_num_steps or (world.data_ended() and not controller.buffer.state())


def check_end(world: World) -> None:
    """The run has ended well: rightly so, and nothing is left lying about."""
    world.demand(not world.suspicion, world.suspicion)
    world.check_every_prompt()
    controller, plan, books = world.controller, world.plan, world.books
    world.demand(not world.exceeded, f"{world.exceeded} is exceeded and the run has ended well")
    waiting = controller.buffer.state()
    world.demand(complete(world), f"ended at step {controller.step} with {len(waiting)} waiting")
    world.endings.append("all steps" if controller.step == plan.max_num_steps else "end of the data")
    left_over = [index for index, why in books.untrained.items() if why == "left_over"]
    world.demand(len(left_over) < plan.min_groups, f"{len(left_over)} are left over, {plan.min_groups} make a step")
    kept = {entry["index"] for entry in waiting if entry["group"]} | set(left_over)
    leaked = {key // world.case.work.samples for key in controller.plane} - kept  # type: ignore[attr-defined]
    world.demand(not leaked, f"the plane still holds rows of prompts {sorted(leaked)}")
    if world.case.sampler == "in_order":
        check_order(world, books)


def check_order(world: World, books: Books) -> None:
    """in_order: the steps are the trainable prompts in their order, whatever was killed, failed or late."""
    case, size = world.case, world.plan.groups_per_step
    ended = {index for index, why in books.untrained.items() if why != "left_over"}
    good = [index for index in range(world.controller.producer.next_index) if index not in ended]
    if not case.timing_decides:
        world.demand(
            all(case.trains(index) for index in good[: sum(map(len, books.trained))]), "trained what must fail"
        )
        world.demand(not any(case.trains(index) for index in ended), "gave up what must succeed")
    steps = [good[size * step : size * (step + 1)] for step in range(len(books.trained))]
    world.demand([sorted(step) for step in books.trained] == steps, f"trained {books.trained}, in order is {steps}")


def first_of(errors: BaseExceptionGroup) -> BaseException:
    """The first error inside a group of them; a violation before all."""
    leaves = list(flat(errors))
    return next((leaf for leaf in leaves if isinstance(leaf, Violation)), leaves[0])


def flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in flat(inner)]
    return [error]
