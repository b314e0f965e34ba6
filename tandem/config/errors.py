"""The one error of a config: every mistake at once, each a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """What is wrong with a recipe or its overrides. `messages` are sentences without a full stop, in reading order."""

    def __init__(self, messages: str | Iterable[str]) -> None:
        self.messages: tuple[str, ...] = (messages,) if isinstance(messages, str) else tuple(messages)
        super().__init__("\n".join(self.messages))
