"""`tandem simulate`: how long a recipe would take, synchronous and ahead, on machines that are only described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from rich.console import Console
from rich.table import Table

from tandem.config import Config
from tandem.config.asynchrony import Custom, InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from tandem.config.load import load
from tandem.control.plan import Plan
from tandem.simulation.lengths import Lengths
from tandem.simulation.run import Machines, Outcome, Work, simulate

LEADS = (0, 1, 2, 4)
STREAMED_WITH_CRITIC, STREAMED_ALONE = 2 / 3, 2 / 5  # see streamed_share
PROMPTS_PER_STEP_USED = 1000  # the data is made long enough not to end, whatever a sampler drops
NO_STALL_S = 1e12


@dataclass(frozen=True)
class Question:
    """What the recipe does not say: how long responses are, and for how many steps to look."""

    law: str
    mean_length: float | None  # None: a quarter of max_new_tokens
    prompt_tokens: int
    steps: int
    timelines: Path | None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: wanted 1 or more")
        if self.prompt_tokens < 0:
            raise ValueError(f"--prompt-tokens {self.prompt_tokens}: wanted 0 or more")


def simulate_recipe(
    recipe: str, overrides: Sequence[str], question: Question, machines: Mapping[str, float], console: Console
) -> None:
    """Print a table of variants; write a timeline of each if asked to."""
    config = load(recipe, overrides).config
    house = Machines(**machines, streamed_share=streamed_share(config))  # type: ignore[arg-type]  # counts are floats too
    work = work_of(config, question)
    if question.timelines:
        question.timelines.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for lead in LEADS:
        timeline = question.timelines / f"lead_{lead}.json" if question.timelines else None
        outcomes[lead] = simulate(plan_of(config, lead, question.steps), house, work, timeline=timeline)
    console.print(assumptions(config, house, work), soft_wrap=True, highlight=False)
    console.print(table_of(config, outcomes))
    if question.timelines:
        console.print(f"timelines: {question.timelines}/lead_N.json, for https://ui.perfetto.dev", highlight=False)


def streamed_share(config: Config) -> float:
    """The share of a step's computing that can be done as groups come, with streaming.

    In forward passes: log-probs, reference, values (1 each) and the critic's gradient (3) come early, the policy's
    gradient (3) when the step is whole. Without a critic: log-probs and reference of that and the policy's.
    """
    return STREAMED_WITH_CRITIC if config.value else STREAMED_ALONE


def work_of(config: Config, question: Question) -> Work:
    longest = config.policy.generation.max_new_tokens
    mean = question.mean_length if question.mean_length is not None else longest / 4
    return Work(
        samples=config.algorithm.num_generations_per_prompt,
        prompt_tokens=question.prompt_tokens,
        lengths=Lengths(question.law, mean, longest, config.seed),
        prompts_per_epoch=PROMPTS_PER_STEP_USED * config.algorithm.num_prompts_per_step,
    )


def plan_of(config: Config, lead: int, steps: int) -> Plan:
    """The recipe's sizes, sampler and warm-up with this lead; nothing is validated, saved, or given a deadline."""
    groups = config.algorithm.num_prompts_per_step
    changes = {"sampler": with_lead(config.async_rl.sampler, lead, groups), "stall_timeout_s": NO_STALL_S}
    return Plan(
        groups_per_step=groups,
        max_num_steps=steps,
        max_num_prompts=PROMPTS_PER_STEP_USED * groups * steps,
        policy_training_start_step=config.policy_training_start_step,
        async_rl=config.async_rl.model_copy(update=changes),
        failures=config.failures,
        dynamic_sampling_max_gen_batches=config.algorithm.dynamic_sampling_max_gen_batches,
        val_period=0,
        val_at_start=False,
        val_at_end=False,
        save_period=steps,
        save_at_end=False,
    )


def with_lead(sampler: Sampler, lead: int, groups: int) -> Sampler:
    """The same sampler, `lead` versions ahead. A look-ahead in warm-up is kept, or raised to the lead."""
    if isinstance(sampler, Windowed):
        capacity = (lead + 1) * groups
        return sampler.model_copy(update={"max_staleness_versions": lead, "buffer_capacity_groups": capacity})
    warmup = sampler.warmup_lookahead_versions
    changes = {"warmup_lookahead_versions": None if warmup is None else max(warmup, lead)}
    match sampler:
        case InOrder() | ReadyFirst() | Custom():
            return sampler.model_copy(update=changes | {"max_lookahead_versions": lead})
        case WeightFifo():
            return sampler.model_copy(update=changes | {"max_staleness_versions": lead})
    assert_never(sampler)


def assumptions(config: Config, machines: Machines, work: Work) -> str:
    """What the table rests on, and what each side alone would need: where they are equal, a lead of 1 gains most."""
    groups, lengths = config.algorithm.num_prompts_per_step, work.lengths
    tokens = groups * work.samples * lengths.mean
    write_s = tokens / (machines.engines * machines.slots * machines.tokens_per_s)
    read = tokens + groups * work.samples * work.prompt_tokens
    train_s = read / (machines.trainers * machines.train_tokens_per_s) + machines.step_s
    update, sampler = config.async_rl.weight_update, config.async_rl.sampler.name
    return (
        f"a step: {groups} prompts x {work.samples} samples; lengths {lengths.law}, mean {lengths.mean:g}, at most "
        f"{lengths.longest} tokens, and {work.prompt_tokens} of the prompt\n"
        f"engines: {machines.engines} x {machines.slots} slots at {machines.tokens_per_s:g} tokens/s a sequence, at "
        f"least {write_s:.3g} s a step; trainers: {machines.trainers} at {machines.train_tokens_per_s:g} tokens/s, "
        f"{train_s:.3g} s a step\n"
        f"sampler {sampler}, weight update {update}: {machines.publish_s:g} s; a score: {machines.score_s:g} s"
    )


def table_of(config: Config, outcomes: Mapping[int, Outcome]) -> Table:
    """One row a variant."""
    steps = next(iter(outcomes.values())).steps
    caption = "engines, trainers: share of their time busy; stale, worst: versions, mean and largest; dropped: groups"
    table = Table(title=f"{config.name}: {steps} steps, simulated", caption=caption)
    for name in ("variant", "s/step", "speed-up", "engines", "trainers", "stale", "worst", "dropped"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for lead, outcome in outcomes.items():
        table.add_row(
            f"lead {lead}" if lead else "sync",
            f"{outcome.step_s:.3g}",
            f"{outcomes[0].step_s / outcome.step_s:.2f}",
            f"{outcome.engines_busy:.0%}",
            f"{outcome.trainers_busy:.0%}",
            f"{outcome.staleness_mean:.2f}",
            f"{outcome.staleness_max:.0f}",
            str(outcome.untrained.get("stale", 0)),
        )
    return table
