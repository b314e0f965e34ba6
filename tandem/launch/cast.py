"""Who stands in for whom as a run is built: whatever is to watch or to disturb a role stands around who plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tandem.roles import Engine, Trainer, Verifier

Role = TypeVar("Role")


def as_built(player: Role) -> Role:
    """Nobody stands in."""
    return player


@dataclass(frozen=True)
class Cast:
    """Each gets who was built to play a role, and gives who plays it: the same, or one around it."""

    engine: Callable[[Engine], Engine] = as_built
    verifier: Callable[[Verifier], Verifier] = as_built
    actor: Callable[[Trainer], Trainer] = as_built


AS_BUILT = Cast()
