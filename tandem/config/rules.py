"""What no single section can check: the rules between keys. Each names both keys, both values and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.idle import idle_messages
from tandem.config.loaded import Loaded
from tandem.config.rules_algorithm import ALGORITHM_RULES
from tandem.config.rules_cluster import CLUSTER_RULES
from tandem.config.rules_data import DATA_RULES
from tandem.config.rules_env import ENV_RULES
from tandem.config.rules_models import MODEL_RULES
from tandem.config.rules_sizes import SIZE_RULES


def broken_rules(loaded: Loaded) -> Iterator[str]:
    """A message for every rule that this config breaks, and for every key that it sets to no effect."""
    if wrong := one_algorithm(loaded):
        yield wrong  # every other rule is about the one that is set
        return
    for rule in (*ALGORITHM_RULES, *SIZE_RULES, *MODEL_RULES, *DATA_RULES, *ENV_RULES, *CLUSTER_RULES):
        yield from rule(loaded)
    yield from idle_messages(loaded)


def one_algorithm(loaded: Loaded) -> str | None:
    """Exactly one of `ppo` and `grpo`."""
    config = loaded.config
    if config.ppo and config.grpo:
        return f"{loaded.at('ppo')} and {loaded.at('grpo')} are both given: remove one (ppo=null or grpo=null)"
    if not config.ppo and not config.grpo:
        return f"{loaded.at('ppo')} and {loaded.at('grpo')}: give one; `ppo: {{}}` takes every default"
    return None
