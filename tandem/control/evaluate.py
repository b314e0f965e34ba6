"""Validation: the prompts of every set, each answered k times and scored; never touches training state."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.metrics.pass_at_k import ks, pass_at_k
from tandem.roles import Dataset
from tandem.types import Mean, Metrics, Prompt, RolloutFailed, Sample, Sum, merge

log = logging.getLogger(__name__)

Play = Callable[[Prompt], Awaitable[Sequence[Sample]]]


@dataclass(frozen=True)
class Answered:
    """One validation prompt and the answers to it."""

    prompt: Prompt
    samples: Sequence[Sample]

    @property
    def right(self) -> int:
        """How many answers are: those with a reward of 1 or more."""
        return sum(sample.score.reward >= 1 for sample in self.samples)


class Evaluator:
    """Plays the prompts of the validation sets and writes every answer to one file a step.

    `play` gives all answers to one prompt. `sets` are named; where there is one set alone its name may be "".
    `max_samples` prompts of each set are played, the first ones (None: all), `batch` of them at one time.
    """

    def __init__(
        self, sets: Mapping[str, Dataset], play: Play, *, max_samples: int | None, batch: int, answers: Path
    ) -> None:
        self._sets = sets
        self._play = play
        self._max_samples = max_samples
        self._batch = batch
        self._answers = answers

    async def __call__(self, step: int, moved: Callable[[], None]) -> Metrics:
        """`val/NAME/...` of each set, and `val/...` of all prompts together. `moved` is called after each prompt."""
        played = {name: await self._answer(name, dataset, moved) for name, dataset in self._sets.items()}
        self._write(step, {name: answered for name, (answered, _) in played.items()})
        parts = {name: metrics_of(answered, failed) for name, (answered, failed) in played.items()}
        metrics = under("val/", merge(*parts.values()))
        for name, part in parts.items():
            metrics |= under(f"val/{name}/", part) if name else {}
        return metrics

    async def _answer(self, name: str, dataset: Dataset, moved: Callable[[], None]) -> tuple[list[Answered], int]:
        """What was answered of a set, in its order, and how many prompts failed."""
        count = min(self._max_samples or len(dataset), len(dataset))
        failures: list[RolloutFailed] = []
        slots = asyncio.Semaphore(self._batch)  # an answer's deadline begins with its request, so not all ask at once

        async def one(index: int) -> Answered | None:
            async with slots:
                prompt = dataset.prompt(index)
                try:
                    return Answered(prompt, await self._play(prompt))
                except RolloutFailed as failure:
                    failures.append(failure)
                    return None
                finally:
                    moved()

        async with asyncio.TaskGroup() as plays:
            tasks = [plays.create_task(one(index)) for index in range(count)]
        answered = [result for task in tasks if (result := task.result())]
        where = f" of {name}" if name else ""
        if not answered:
            raise ValueError(f"none of the {count} validation prompts{where} could be scored; the first: {failures[0]}")
        if failures:
            log.warning("%d of %d validation prompts%s failed; the first: %s", len(failures), count, where, failures[0])
        return answered, len(failures)

    def _write(self, step: int, played: Mapping[str, Sequence[Answered]]) -> None:
        self._answers.mkdir(parents=True, exist_ok=True)
        with (self._answers / f"step_{step:06d}.jsonl").open("w", encoding="utf-8") as file:
            for name, answered in played.items():
                for one in answered:
                    for number, sample in enumerate(one.samples):
                        file.write(json.dumps(record_of(name, one.prompt, number, sample), ensure_ascii=False) + "\n")


def metrics_of(answered: Sequence[Answered], failed: int) -> Metrics:
    """Mean reward, accuracy (the share of answers with reward 1 or more), length; with k answers mean@k and pass@k."""
    samples = [sample for one in answered for sample in one.samples]
    rewards = [sample.score.reward for sample in samples]
    metrics: Metrics = {
        "reward": Mean(sum(rewards), len(samples)),
        "accuracy": Mean(sum(one.right for one in answered), len(samples)),
        "length": Mean(sum(sum(sample.mask) for sample in samples), len(samples)),
        "truncated": Mean(sum(sample.truncated for sample in samples), len(samples)),
        "failed": Sum(failed),
    }
    for part in samples[0].score.components:
        metrics[f"reward/{part}"] = Mean(sum(sample.score.components[part] for sample in samples), len(samples))
    count = len(answered[0].samples)
    for k in ks(count):
        estimates = [pass_at_k(count, one.right, k) for one in answered]
        metrics[f"pass@{k}"] = Mean(sum(estimates), len(estimates))
    if count > 1:
        metrics[f"mean@{count}"] = metrics["accuracy"]
    return metrics


def under(prefix: str, metrics: Metrics) -> Metrics:
    """The metrics by names that begin with `prefix`."""
    return {prefix + name: metric for name, metric in metrics.items()}


def record_of(name: str, prompt: Prompt, number: int, sample: Sample) -> dict[str, object]:
    """One answer as it is written down: its set, where sets have names, and its number where there are several."""
    return {
        **({"set": name} if name else {}),
        "id": prompt.id,
        "sample": number,
        "question": prompt.question,
        "answer": prompt.answer,
        "response": sample.text,
        "reward": sample.score.reward,
        **({"components": dict(sample.score.components)} if sample.score.components else {}),
        "truncated": sample.truncated,
    }
