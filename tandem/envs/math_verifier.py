"""`math_verify`: the library math-verify in worker processes, for whatever an expression does to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec

from tandem.config.env import MathVerifyVerifier
from tandem.envs.numerals import reference_number
from tandem.envs.workers import RequestLost, Unreadable, Workers, first_lost
from tandem.types import Prompt, RolloutFailed, Score

log = logging.getLogger(__name__)
CHECKED_ANSWERS = 500  # distinct ones that are no plain numbers; reading one takes milliseconds to tens of them


class MathVerify:
    """1 if the response's final expression equals the reference answer's.

    A response that is past a limit of time, memory or depth costs one worker. It has not been shown to be right, and
    it would not be the next time: by default its reward is 0, so that a policy cannot learn to write what hangs.
    """

    def __init__(self, config: MathVerifyVerifier) -> None:
        if find_spec("math_verify") is None:
            raise ValueError(
                "env.verifier.name=math_verify needs the package math-verify, which is not installed here: install "
                "'math-verify[antlr4_9_3]', or choose env.verifier.name=dapo_math"
            )
        self._config = config
        self._workers = Workers("math", count=config.num_workers, memory_bytes=config.memory_bytes)

    async def score(self, prompt: Prompt, response: str) -> Score:
        try:
            right = await self._workers.ask({"answer": prompt.answer, "response": response}, self._config.timeout_s)
        except Unreadable as error:
            raise RolloutFailed(
                f"math_verify cannot read the reference answer of prompt {prompt.id!r}: {error}"
            ) from error
        except RequestLost as lost:
            what = f"comparing the response to prompt {prompt.id!r} {lost}"
            if self._config.on_timeout == "drop":
                raise RolloutFailed(f"{what} (env.verifier.on_timeout=drop)") from lost
            log.warning("%s: taken for wrong (env.verifier.on_timeout=wrong); it ends with %r", what, response[-80:])
            return Score(0.0)
        return Score(float(right is True))

    async def close(self) -> None:
        """End its processes."""
        await self._workers.close()


def first_unreadable(config: MathVerifyVerifier, answers: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The first (id, answer) that math-verify cannot read. Of answers that are no numbers, only so many are tried."""
    chosen: dict[str, str] = {}
    for name, answer in answers:
        if len(chosen) < CHECKED_ANSWERS and answer not in chosen and reference_number(answer) is None:
            chosen[answer] = name
    if not chosen:
        return None
    requests = [{"answer": answer, "response": r"\boxed{1}", "timeout_s": config.timeout_s} for answer in chosen]
    lost = first_lost("math", requests, config.memory_bytes)
    if lost is None:
        return None
    answer = list(chosen)[lost[0]]
    return chosen[answer], answer
