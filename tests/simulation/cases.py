"""A seed -> a whole case: a plan, machines, times, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.config.asynchrony import AsyncRl, Custom, Failures, InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from tandem.control.entries import Entries
from tandem.control.plan import Plan
from tandem.control.samplers import Choice, whole
from tandem.simulation.lengths import Lengths, uniform
from tandem.simulation.rollouts import Fate
from tandem.simulation.run import Machines, Work

SAMPLERS = ("in_order", "weight_fifo", "ready_first", "windowed", "custom")
LONG_S, STALL_S = 1e5, 1e6  # a deadline that only a hanging rollout meets; a stall that no healthy run has
FOR_EVER = 10**9
UPDATES = (  # aborted and kept is in_flight here: reading a text takes no time
    {"weight_update": "drain"},
    {"weight_update": "in_flight"},
    {"weight_update": "abort_and_reissue", "discard_partial_rollouts": True},
)


def latest_arrival_first(entries: Entries, version: int, want: int) -> Choice | None:
    """The custom sampler of these cases: starves the oldest, which is its right."""
    return whole(list(reversed(entries.by_arrival.values()))[:want], want)


@dataclass(frozen=True)
class Case:
    """What one seed runs. `kills`: after how many rounds of events each life ends; `stops`: when each is asked to stop;
    `crashes_s`: when an engine dies, in every life; `later_lead`: of lives after the first.
    """

    seed: int
    sampler: str
    lead: int
    later_lead: int
    plan: Plan
    machines: Machines
    work: Work
    rates: Mapping[Fate, float]
    kills: tuple[int, ...]
    stops: tuple[int, ...]
    crashes_s: tuple[float, ...]
    save_s: float
    saves_beside: bool
    evaluate_s: float | None

    def plan_of_life(self, life: int) -> Plan:
        """A resumed run may have another lead."""
        if life == 0 or self.later_lead == self.lead:
            return self.plan
        sampler = sampler_of(self.sampler, self.later_lead, None, self.plan.groups_per_step)
        return replace(self.plan, async_rl=self.plan.async_rl.model_copy(update={"sampler": sampler}))

    def staleness_bound(self, life: int) -> int | None:
        """The worst staleness that the sampler promises; None: it promises nothing."""
        if self.sampler in ("ready_first", "custom"):
            return None
        if self.sampler == "in_order":  # what an earlier life has started under a larger lead is trained all the same
            return max(self.lead, self.later_lead) if life else self.lead
        return self.later_lead if life else self.lead

    def trouble(self, index: int) -> tuple[Fate, int]:
        """What goes wrong with a prompt, and how many times."""
        chance, times = uniform(self.seed, index, 1), 1 + int(3 * uniform(self.seed, index, 2))
        fate = self._fate(chance)
        if fate == "infrastructure" and times >= self.plan.failures.max_infra_attempts_per_prompt:
            times = FOR_EVER
        return fate, times

    def _fate(self, chance: float) -> Fate:
        for fate, rate in self.rates.items():
            if chance < rate:
                return fate
            chance -= rate
        return "well"

    def trains(self, index: int) -> bool:
        """Whether a prompt gives a group, whatever the timing. Not to be asked where a deadline is tight."""
        fate, times = self.trouble(index)
        if fate in ("data", "nan"):
            return times < self.plan.failures.max_data_attempts_per_prompt
        return fate != "no_signal" and times < FOR_EVER

    @property
    def timing_decides(self) -> bool:
        """Whether the machines' speed decides which prompts are given up: then two lives may differ."""
        one_attempt = self.plan.failures.max_infra_attempts_per_prompt == 1
        tight = self.work.timeout_s is not None and self.work.timeout_s < LONG_S
        return tight or bool(self.crashes_s) or (one_attempt and self.work.timeout_s is not None)


def case_of(seed: int) -> Case:
    """Everything about a case is drawn from its seed."""
    draw = random.Random(seed)
    sampler = SAMPLERS[seed % len(SAMPLERS)]
    groups, lead, steps = draw.randint(1, 4), draw.choice((0, 0, 1, 1, 2, 3, 4)), draw.randint(1, 8)
    later_lead = draw.randint(0, 4) if draw.random() < 0.2 else lead
    mood = draw.choice(("calm", "troubled", "tight"))
    plan = draw_plan(draw, sampler, groups, lead, steps)
    if mood == "tight":
        plan = replace(plan, failures=tight_failures(draw), dynamic_sampling_max_gen_batches=draw.randint(2, 5))
    lengths = Lengths(draw.choice(("fixed", "lognormal", "heavy")), mean=draw.choice((5, 20)), longest=100, seed=seed)
    return Case(
        seed=seed,
        sampler=sampler,
        lead=lead,
        later_lead=later_lead,
        plan=plan,
        machines=draw_machines(draw),
        work=Work(
            samples=draw.randint(1, 3),
            prompt_tokens=draw.randint(0, 3),
            lengths=lengths,
            prompts_per_epoch=max(1, plan.max_num_prompts // draw.randint(1, 3)),
            timeout_s=draw.choice((None, LONG_S, LONG_S, draw.uniform(10, 60))),
        ),
        rates={} if mood == "calm" else draw_rates(draw, tight=mood == "tight"),
        kills=tuple(draw.randint(1, 40 * steps * groups) for _ in range(draw.choice((0, 0, 1, 2, 3)))),
        stops=tuple(draw.randint(1, 30 * steps * groups) for _ in range(draw.choice((0, 0, 0, 1, 2)))),
        crashes_s=tuple(draw.uniform(0, 20 * steps) for _ in range(draw.choice((0, 0, 0, 1, 3)))),
        save_s=draw.choice((0.0, 0.5, 20.0)),
        saves_beside=draw.random() < 0.3,
        evaluate_s=draw.choice((None, 3.0)),
    )


def draw_plan(draw: random.Random, sampler: str, groups: int, lead: int, steps: int) -> Plan:
    start = draw.choice((0, 0, 0, 1, 2, 3))
    warmup = draw.choice((None, lead, lead + 1, lead + 4)) if start and sampler != "windowed" else None
    streams = draw.randint(1, groups - 1) if groups > 1 and draw.random() < 0.3 else None
    short = draw.random() < 0.3
    return Plan(
        groups_per_step=groups,
        max_num_steps=steps,
        max_num_prompts=draw.randint(1, 2 * steps * groups) if short else 50 * steps * groups,
        policy_training_start_step=start,
        async_rl=AsyncRl(
            sampler=sampler_of(sampler, lead, warmup, groups + draw.randint(0, 12)),
            **draw.choice(UPDATES),
            min_groups_for_streaming_train=streams,
            min_step_batch_fraction=0.0 if streams else draw.choice((0.0, 0.5, 1.0)),
            stall_timeout_s=STALL_S,
        ),
        failures=draw_failures(draw),
        dynamic_sampling_max_gen_batches=50,
        val_period=draw.choice((0, 2)),
        val_at_start=draw.random() < 0.3,
        val_at_end=draw.random() < 0.3,
        save_period=draw.choice((1, 1, 2, 3)),
        save_at_end=draw.random() < 0.5,
    )


def sampler_of(name: str, lead: int, warmup: int | None, capacity: int) -> Sampler:
    match name:
        case "in_order":
            return InOrder(max_lookahead_versions=lead, warmup_lookahead_versions=warmup)
        case "ready_first":
            return ReadyFirst(name="ready_first", max_lookahead_versions=lead, warmup_lookahead_versions=warmup)
        case "weight_fifo":
            return WeightFifo(name="weight_fifo", max_staleness_versions=lead, warmup_lookahead_versions=warmup)
        case "windowed":
            return Windowed(
                name="windowed",
                buffer_capacity_groups=capacity,
                max_staleness_versions=lead,
                sample_freshest_first=capacity % 2 == 0,
            )
    target = "tests.simulation.cases:latest_arrival_first"
    return Custom(name="custom", target=target, max_lookahead_versions=lead, warmup_lookahead_versions=warmup)


def tight_failures(draw: random.Random) -> Failures:
    """Budgets that a case may exceed."""
    return Failures(
        max_infra_attempts_per_prompt=draw.randint(1, 2),
        max_data_attempts_per_prompt=draw.randint(1, 2),
        backoff_base_s=0.0,
        max_skipped_prompts=draw.randint(0, 8),
        max_consecutive_dropped_prompts=draw.randint(0, 3),
    )


def draw_failures(draw: random.Random) -> Failures:
    return Failures(
        max_infra_attempts_per_prompt=draw.randint(1, 3),
        max_data_attempts_per_prompt=draw.randint(1, 3),
        backoff_base_s=draw.choice((0.0, 1.0)),
        max_backoff_s=draw.choice((1.0, 60.0)),
        max_skipped_prompts=FOR_EVER,
        max_consecutive_dropped_prompts=FOR_EVER,
    )


def draw_machines(draw: random.Random) -> Machines:
    return Machines(
        engines=draw.randint(1, 3),
        slots=draw.randint(1, 6),
        tokens_per_s=10.0,
        trainers=1,
        train_tokens_per_s=draw.choice((3.0, 30.0, 1e6)),
        step_s=draw.choice((0.0, 1.0)),
        publish_s=draw.choice((0.0, 0.3)),
        score_s=draw.choice((0.0, 0.7)),
        streamed_share=draw.choice((0.0, 0.5)),
    )


def draw_rates(draw: random.Random, *, tight: bool) -> dict[Fate, float]:
    """How often each trouble comes; most cases have a few kinds."""
    worst: dict[Fate, float] = {
        "no_signal": 0.4, "slow": 0.2, "hang": 0.05, "score_hang": 0.05, "infrastructure": 0.2, "data": 0.2, "nan": 0.1,
        "lost_row": 0.05,
    }  # fmt: skip
    rates = {fate: draw.uniform(0, rate) for fate, rate in worst.items() if draw.random() < 0.4}
    if tight:
        rates |= {"data": draw.uniform(0, 0.3), "no_signal": draw.uniform(0, 0.6)}
    return rates
