"""What a group asks of the samples that an environment returns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tandem.plane.memory import MemoryPlane
from tandem.roles import Write
from tandem.rollout.groups import GroupRollOut
from tandem.types import Prompt, RolloutFailed, Sample, Sampling, Score
from tests.contracts.engine_kinds import start_transformers
from tests.rollout.tiny_models import tiny_model

SAMPLING = Sampling(max_new_tokens=2, temperature=1.0, seed=0, stop_token_ids=())


class Parts:
    """An environment of a user's, whose reward has these parts, one mapping a sample in turn."""

    def __init__(self, *parts: Mapping[str, float]) -> None:
        self._parts = list(parts)

    async def play(self, prompt: Prompt, write: Write) -> Sample:
        parts = self._parts.pop(0)
        written = await write(prompt.tokens)
        given, count = len(prompt.tokens), len(written.tokens)
        return Sample(
            tokens=prompt.tokens + written.tokens,
            mask=(False,) * given + (True,) * count,
            logprobs=(0.0,) * given + written.logprobs,
            versions=(-1,) * given + written.versions,
            score=Score(sum(parts.values()), parts),
            truncated=False,
            text="",
        )

    async def close(self) -> None:
        """It holds nothing."""


def components(*parts: Mapping[str, float], groups: int) -> list[Mapping[str, tuple[float, ...]]]:
    """Those of so many groups of two samples."""

    async def body() -> list[Mapping[str, tuple[float, ...]]]:
        engine = start_transformers(tiny_model(), 2)
        roll_out = GroupRollOut(
            env=Parts(*parts),
            engine=engine,
            plane=MemoryPlane(),
            samples=2,
            sampling=SAMPLING,
            timeout_s=60.0,
            need_spread=False,
        )
        try:
            found = [await roll_out(Prompt(i, f"p{i}", "q", "a", (1, 2)), attempt=0) for i in range(groups)]
        finally:
            await engine.close()
        return [group.components for group in found if group is not None]

    return asyncio.run(body())


def test_parts_of_a_reward_are_kept_by_name():
    first = {"right": 1.0, "short": 0.5}
    second = {"short": 0.0, "right": 0.0}
    assert components(first, second, groups=1) == [{"right": (1.0, 0.0), "short": (0.5, 0.0)}]


@pytest.mark.parametrize("groups", [1, 2])
def test_samples_with_other_parts_than_those_before_fail_with_both_named(groups: int):
    parts = [{"right": 1.0}] * (2 * groups - 1) + [{"right": 0.0, "short": 0.5}]
    with pytest.raises(RolloutFailed, match=rf"prompt 'p{groups - 1}'.*'right', 'short'.*before it 'right'") as failed:
        components(*parts, groups=groups)
    assert failed.value.kind == "data"


def test_a_reward_without_parts_after_one_with_parts_fails():
    with pytest.raises(RolloutFailed, match="no parts"):
        components({"right": 1.0}, {}, groups=1)
