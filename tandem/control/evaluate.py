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
        async with asyncio.TaskGroup() as plays:
            tasks = [plays.create_task(self._one(self._dataset.prompt(index))) for index in range(self._count)]
        played = [result for task in tasks if (result := task.result())]
        if not played:
            raise RuntimeError(
                f"none of the {self._count} validation prompts could be scored; the log names the causes"
            )
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

    async def _one(self, prompt: Prompt) -> tuple[Prompt, Sample] | None:
        try:
            return prompt, (await self._play(prompt))[0]
        except RolloutFailed as failure:
            log.warning("validation: %s", failure)
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
