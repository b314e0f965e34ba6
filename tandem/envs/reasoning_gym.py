"""`reasoning_gym`: the library's own scorers, in worker processes, for whatever a response does to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec

from tandem.config.env import ReasoningGymVerifier
from tandem.envs.workers import RequestLost, Unreadable, Workers, first_lost
from tandem.types import Prompt, RolloutFailed, Score

log = logging.getLogger(__name__)


class ReasoningGym:
    """What the task's scorer gives to the text inside the response's last answer tags; 0 without them.

    A response that breaks the scorer, or is past a limit, has not been shown to be right: 0, and a line in the log.
    """

    def __init__(self, config: ReasoningGymVerifier) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError(
                "env.verifier.name=reasoning_gym needs the package reasoning-gym: install the extra"
                " (uv sync --extra reasoning-gym)"
            )
        self._config = config
        self._workers = Workers("reasoning", count=config.num_workers, memory_bytes=config.memory_bytes)

    async def score(self, prompt: Prompt, response: str) -> Score:
        answer = tagged(response, self._config.answer_tag)
        if answer is None:
            return Score(0.0)
        try:
            score = await self._workers.ask({"answer": prompt.answer, "response": answer}, self._config.timeout_s)
        except Unreadable as error:
            raise RolloutFailed(f"reasoning_gym cannot score prompt {prompt.id!r}: {error}") from error
        except RequestLost as lost:
            log.warning("scoring the response to prompt %r %s: taken for wrong", prompt.id, lost)
            return Score(0.0)
        assert isinstance(score, float), "a worker's reply"
        return Score(score)

    async def close(self) -> None:
        """End its processes."""
        await self._workers.close()


def tagged(response: str, tag: str) -> str | None:
    """What stands between the last `<tag>` and its `</tag>`, without space around it."""
    before, end, _ = response.rpartition(f"</{tag}>")
    _, begin, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if begin and end else None


def first_unscorable(config: ReasoningGymVerifier, answers: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The first (id, why) that cannot be scored, of one prompt of each task."""
    chosen: dict[str, tuple[str, str]] = {}
    for name, answer in answers:
        try:
            task = json.loads(answer)["metadata"]["source_dataset"]
        except (ValueError, TypeError, KeyError):
            return name, "it holds no entry of reasoning-gym; such rows come from data.train.name=reasoning_gym"
        chosen.setdefault(str(task), (name, answer))
    requests = [{"answer": answer, "response": "", "timeout_s": 60.0} for _, answer in chosen.values()]
    lost = first_lost("reasoning", requests, config.memory_bytes)
    return None if lost is None else (list(chosen.values())[lost[0]][0], lost[1])
