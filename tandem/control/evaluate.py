"""Validation: every prompt of the set once, scored by the same verifier; never touches training state."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tandem.roles import Dataset
from tandem.types import Mean, Metrics, Prompt, RolloutFailed, Sample, Sum

log = logging.getLogger(__name__)

Play = Callable[[Prompt], Awaitable[Sequence[Sample]]]


class Evaluator:
    """Plays the validation prompts and writes every answer to one file a step."""

    def __init__(self, dataset: Dataset, play: Play, *, max_samples: int, answers: Path) -> None:
        self._dataset = dataset
        self._play = play
        self._count = min(max_samples, len(dataset))
        self._answers = answers

    async def __call__(self, step: int) -> Metrics:
        """Mean reward, accuracy (the share of answers with reward 1 or more) and length."""
        failures: list[RolloutFailed] = []
        async with asyncio.TaskGroup() as plays:
            prompts = (self._dataset.prompt(index) for index in range(self._count))
            tasks = [plays.create_task(self._one(prompt, failures)) for prompt in prompts]
        played = [result for task in tasks if (result := task.result())]
        if not played:
            raise ValueError(f"none of the {self._count} validation prompts could be scored; the first: {failures[0]}")
        if failures:
            log.warning("%d of %d validation prompts failed; the first: %s", len(failures), self._count, failures[0])
        self._write(step, played)
        rewards = [sample.score.reward for _, sample in played]
        lengths = [sum(sample.mask) for _, sample in played]
        return {
            "val/reward": Mean(sum(rewards), len(rewards)),
            "val/accuracy": Mean(sum(reward >= 1 for reward in rewards), len(rewards)),
            "val/length": Mean(sum(lengths), len(lengths)),
            "val/truncated": Mean(sum(sample.truncated for _, sample in played), len(played)),
            "val/failed": Sum(self._count - len(played)),
        }

    async def _one(self, prompt: Prompt, failures: list[RolloutFailed]) -> tuple[Prompt, Sample] | None:
        try:
            return prompt, (await self._play(prompt))[0]
        except RolloutFailed as failure:
            failures.append(failure)
            return None

    def _write(self, step: int, played: Sequence[tuple[Prompt, Sample]]) -> None:
        self._answers.mkdir(parents=True, exist_ok=True)
        with (self._answers / f"step_{step:06d}.jsonl").open("w") as file:
            for prompt, sample in played:
                record = {
                    "id": prompt.id,
                    "question": prompt.question,
                    "answer": prompt.answer,
                    "response": sample.text,
                    "reward": sample.score.reward,
                    "truncated": sample.truncated,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
