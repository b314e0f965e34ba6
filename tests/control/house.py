"""Small roles that run in memory, for watching the controller: every event goes to one list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from tandem.config.asynchrony import AsyncRl, Failures, InOrder
from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.controller import Controller
from tandem.control.plan import Plan
from tandem.control.samplers import build_sampler
from tandem.plane.memory import MemoryPlane
from tandem.types import Batch, Group, Mean, Metrics, Prompt, RolloutFailed


def plan(**changes: object) -> Plan:
    """Three steps of two groups, synchronous, unless said otherwise."""
    lead, warmup = changes.pop("lead", 0), changes.pop("warmup", None)
    sampler = InOrder(max_lookahead_versions=lead, warmup_lookahead_versions=warmup)
    async_rl = AsyncRl(**{"sampler": sampler, **changes.pop("async_rl", {})})
    failures = Failures(**{"backoff_base_s": 0.0, "max_infra_attempts_per_prompt": 1, **changes.pop("failures", {})})
    fields = {
        "groups_per_step": 2,
        "max_num_steps": 3,
        "max_num_prompts": 1000,
        "policy_training_start_step": 0,
        "async_rl": async_rl,
        "failures": failures,
        "dynamic_sampling_max_gen_batches": 10,
        "val_period": 0,
        "val_at_start": False,
        "val_at_end": False,
        "save_period": 1,
        "save_at_end": False,
    }
    return Plan(**{**fields, **changes})


@dataclass
class House:
    """The roles around a controller. `behave(index)` may raise RolloutFailed or return False for no signal."""

    behave: Callable[[int], bool] = lambda index: True
    delay: Callable[[int], int] = lambda index: index % 3
    events: list[tuple] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    untrained: list[Mapping[str, str | int]] = field(default_factory=list)
    published: int = 0

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, f"p{index}", "?", "!", (1,))

    def __len__(self) -> int:
        return 1000

    async def roll_out(self, prompt: Prompt, *, attempt: int) -> Group | None:
        self.events.append(("start", prompt.index, self.published))
        version = self.published
        for _ in range(self.delay(prompt.index)):
            await asyncio.sleep(0)
        if not self.behave(prompt.index):
            return None
        return Group(prompt.index, prompt.id, (prompt.index,), (4,), (3,), (1.0,), (False,), {}, version, version)

    async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
        parts = [chunk async for chunk in chunks]
        self.events.append(("train", step, Batch.join(parts).keys))
        self.chunks.append([len(part) for part in parts])
        for _ in range(10):
            await asyncio.sleep(0)
        return {"actor/loss": Mean(1.0, 1)}

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None: ...

    async def publish(self, version: int) -> Metrics:
        self.events.append(("publish", version))
        self.published = version
        return {}

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncIterator[None]:
        yield

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self.records.append((step, dict(record)))

    def close(self) -> None: ...

    def span(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def drain(self) -> Metrics:
        return {}

    def controller(self, the_plan: Plan, **changes: object) -> Controller:
        roles = {
            "algorithm": self,
            "dataset": self,
            "roll_out": self.roll_out,
            "buffer": Buffer(build_sampler(the_plan.async_rl.sampler)),
            "plane": MemoryPlane(),
            "sync": self,
            "gpus": self,
            "evaluate": None,
            "save": None,
            "clock": self,
            "sinks": [self],
            "accounts": Accounts(self.untrained.append),
            "health": None,
            "recorder": None,
        }
        return Controller(the_plan, **{**roles, **changes})

    def trained(self) -> list[tuple[int, ...]]:
        return [event[2] for event in self.events if event[0] == "train"]

    def staleness(self) -> list[float]:
        return [record["staleness/max"] for _, record in self.records]


def failing(*indexes: int) -> Callable[[int], bool]:
    """A behaviour that raises for these prompts."""

    def behave(index: int) -> bool:
        if index in indexes:
            raise RolloutFailed(f"p{index} broke")
        return True

    return behave
