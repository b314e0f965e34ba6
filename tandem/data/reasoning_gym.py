"""Problems that the library reasoning-gym makes: by task, seed and number, so that a row is always the same one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from types import ModuleType

from tandem.config.data import ReasoningGymData
from tandem.data.rows import Row


def reasoning_gym_rows(config: ReasoningGymData, key: str) -> Iterator[Row]:
    """`size` problems of each task. The answer is the library's whole entry, which its scorer wants.

    ValueError when the package or a task is not there, or when a task's entry does not survive being written down.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library that it imports, compiled for the first time
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"{key}.name=reasoning_gym needs the package reasoning-gym: install the extra"
            " (uv sync --extra reasoning-gym)"
        ) from error
    for task in config.tasks:
        if task not in DATASETS:
            raise ValueError(
                f"{key}.tasks: reasoning-gym has no task {task!r}; there are: {', '.join(sorted(DATASETS))}"
            )
        yield from task_rows(reasoning_gym, task, config, key)


def task_rows(library: ModuleType, task: str, config: ReasoningGymData, key: str) -> Iterator[Row]:
    """The problems of one task, with the library's own settings for it."""
    try:
        problems = library.create_dataset(task, size=config.size, seed=config.seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{key}.tasks: {task!r} cannot be made with settings of its own alone: {error}") from error
    for number in range(config.size):
        entry = problems[number]
        written = json.dumps(entry, ensure_ascii=False)
        if number == 0 and problems.score_answer(entry["answer"], json.loads(written)) != 1.0:
            raise ValueError(
                f"{key}.tasks: {task!r} does not know its own answer once it was written down: leave it out"
            )
        yield Row(f"{task}:{config.seed}:{number}", entry["question"], written)
