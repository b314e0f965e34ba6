"""`llm_judge`: a language model behind an OpenAI-compatible endpoint writes the score."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping

import httpx2

from tandem.config.env import LlmJudgeVerifier
from tandem.types import FailureKind, Prompt, RolloutFailed, Score

RETRIED = {408, 409, 425, 429}  # and 5xx: the same request may succeed later
SHOWN_CHARS = 200


class JudgeFailed(Exception):
    """A request gave no score: why, in words, and whether it may succeed later."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class LlmJudge:
    """Asks for one score a response. What goes wrong is tried again where that may help, and is never a reward of 0.

    `on_error: drop` lets the rollout fail, which is counted and budgeted; `fail` ends the run.
    """

    def __init__(self, config: LlmJudgeVerifier) -> None:
        self._config = config
        self._key = _key(config)
        self._pattern = re.compile(config.score_pattern)
        self._turns = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx2.AsyncClient | None = None  # made where it is used: it belongs to one event loop

    async def score(self, prompt: Prompt, response: str) -> Score:
        texts = {"question": prompt.question, "answer": prompt.answer, "response": response}
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": filled(self._config.prompt, texts)}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        try:
            async with self._turns:
                return Score(await self._ask(body))
        except JudgeFailed as failure:
            judge = f"the judge {self._config.model} at {self._config.base_url}"
            what = f"{judge}, asked about prompt {prompt.id!r}: {failure}"
            if self._config.on_error == "fail":
                raise RuntimeError(f"{what} (env.verifier.on_error=fail ends the run)") from failure
            raise RolloutFailed(what, failure.kind) from failure

    async def _ask(self, body: Mapping[str, object]) -> float:
        """The score, by as many requests as the recipe allows."""
        tries = 1 + self._config.max_retries
        for attempt in range(tries):
            try:
                return self._read(await self._request(body))
            except JudgeFailed as failure:
                if failure.kind == "data":
                    raise
                if attempt + 1 == tries:
                    raise JudgeFailed(f"{failure} ({tries} tries)", failure.kind) from failure
            await asyncio.sleep(self._config.retry_backoff_s * 2**attempt)
        raise AssertionError("the last try returns or raises")

    async def _request(self, body: Mapping[str, object]) -> str:
        """What the judge wrote."""
        if self._client is None:
            # The turns bound the connections; a proxy of the environment is not for a judge that the recipe names.
            unbounded = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = httpx2.AsyncClient(headers=headers, limits=unbounded, trust_env=False)
        url = f"{self._config.base_url.rstrip('/')}/chat/completions"
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                reply = await self._client.post(url, json=body, timeout=None)
        except TimeoutError as error:
            raise JudgeFailed(
                f"no reply in request_timeout_s={self._config.request_timeout_s:g}", "infrastructure"
            ) from error
        except httpx2.HTTPError as error:
            raise JudgeFailed(f"{type(error).__name__}: {error}", "infrastructure") from error
        if reply.status_code != 200:
            retried = reply.status_code in RETRIED or reply.status_code >= 500
            said = f"HTTP {reply.status_code}: {reply.text[:SHOWN_CHARS]!r}"
            raise JudgeFailed(said, "infrastructure" if retried else "data")
        return _content(reply)

    def _read(self, written: str) -> float:
        """The last score in what the judge wrote, mapped to 0..1. A judge draws anew, so another try may have one."""
        group = 1 if self._pattern.groups else 0
        found = [one[group] for one in self._pattern.finditer(written)][-1:]
        low, high = self._config.min_score, self._config.max_score
        wanted = f"a number from {low:g} to {high:g} where score_pattern={self._config.score_pattern!r} finds it"
        try:
            number = float(found[0]) if found else None
        except (TypeError, ValueError):
            number = None
        if number is None or not low <= number <= high:
            shown = f"...{written[-SHOWN_CHARS:]!r}"
            raise JudgeFailed(
                f"wrote {'no score' if number is None else f'{number:g}'}: {shown}; wanted: {wanted}", "infrastructure"
            )
        return (number - low) / (high - low)

    async def close(self) -> None:
        """End its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def filled(template: str, texts: Mapping[str, str]) -> str:
    """The template with each `{name}` replaced, once: a brace in a text stays one, and a text cannot name another."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in texts), lambda found: texts[found[0][1:-1]], template)


def _content(reply: httpx2.Response) -> str:
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        said = reply.text[:SHOWN_CHARS]
        raise JudgeFailed(f"no chat completion but {said!r}", "infrastructure") from error
    if not isinstance(content, str):
        raise JudgeFailed(f"the completion's content is {content!r:.60}, no text", "infrastructure")
    return content


def _key(config: LlmJudgeVerifier) -> str | None:
    if config.api_key_env is None:
        return None
    if not os.environ.get(config.api_key_env):
        raise ValueError(
            f"env.verifier.api_key_env={config.api_key_env}, but there is no such environment variable: set it to the"
            " judge's key, or take env.verifier.api_key_env back for an endpoint that wants none"
        )
    return os.environ[config.api_key_env]
