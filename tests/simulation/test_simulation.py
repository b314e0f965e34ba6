"""The real controller under seeded delay, failure and death: thousands of cases, each watched at every event."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.cases import SAMPLERS, case_of
from tests.simulation.lives import run_case
from tests.simulation.world import Violation

CHUNK, CHUNKS = 250, 12
# Seeds of each sampler that are killed at every one of their events, and how many events such a case may have.
EVERY_EVENT_SEEDS, LONGEST = 40, 120


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Every case warns of prompts that are given up; keeping those records would cost more than the cases."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, CHUNK * CHUNKS, CHUNK))
def test_every_invariant_holds_at_every_event(first: int):
    failures = []
    for seed in range(first, first + CHUNK):
        try:
            run_case(case_of(seed))
        except Violation as violation:
            failures.append(f"{violation}\n    replay: python -m tests.simulation --seed {seed}")
    assert not failures, "\n".join(failures)


def test_the_seeds_reach_every_sampler_and_every_way_to_end():
    endings: Counter[str] = Counter()
    for seed in range(500):
        world = run_case(case_of(seed))
        endings.update(world.endings)
        endings.update(f"untrained: {why}" for why in world.books.untrained.values())
        endings[world.case.sampler] += 1
    wanted = {
        *SAMPLERS,
        *("all steps", "end of the data", "killed", "stopped", "stalled", "lost row"),
        *("max_skipped_prompts", "max_consecutive_dropped_prompts", "dynamic_sampling_max_gen_batches"),
        *(f"untrained: {why}" for why in ("data_failure", "infrastructure_failure", "no_signal", "stale", "left_over")),
    }
    rare = {name: endings[name] for name in wanted if endings[name] < 5}
    assert not rare, f"too rare to be tested: {rare} of {endings}"


def small_cases(sampler: str) -> Iterator[int]:
    """The first few seeds of a sampler whose cases lose prompts neither to time nor to a budget."""
    found = 0
    for seed in range(SAMPLERS.index(sampler), 10_000, len(SAMPLERS)):
        case = replace(case_of(seed), kills=(), stops=())
        if case.timing_decides or case.plan.max_num_steps < 3 or case.plan.groups_per_step < 2:
            continue
        world = run_case(case)
        if world.exceeded or world.rounds_in_all > LONGEST:
            continue
        yield seed
        found += 1
        if found == EVERY_EVENT_SEEDS:
            return


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_killed_at_any_event_and_resumed_loses_nothing(sampler: str):
    """And in_order trains what the whole run trains, step by step."""
    seeds = list(small_cases(sampler))
    assert len(seeds) == EVERY_EVENT_SEEDS
    for seed in seeds:
        case = case_of(seed)
        case = replace(case, later_lead=case.lead)
        whole = run_case(replace(case, kills=(), stops=()))
        for moment in range(1, whole.rounds_in_all + 1):
            resumed = run_case(replace(case, kills=(moment,), stops=()))
            if sampler == "in_order":
                trained = [[sorted(step) for step in world.books.trained] for world in (whole, resumed)]
                assert trained[0] == trained[1], f"seed {seed}, killed at round {moment}"
