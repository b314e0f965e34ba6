"""Every rule between keys: a config that breaks it, what the message names, and the way out that makes it load."""

import re
from collections.abc import Callable

import pytest

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.rules_algorithm import ALGORITHM_RULES
from tandem.config.rules_cluster import CLUSTER_RULES
from tandem.config.rules_data import DATA_RULES
from tandem.config.rules_env import ENV_RULES
from tandem.config.rules_models import MODEL_RULES
from tandem.config.rules_sizes import SIZE_RULES
from tests.config import backend_cases, cluster_cases, data_cases, env_cases, health_cases, rule_cases
from tests.config.rule_cases import PPO

CASES = [
    *rule_cases.CASES,
    *cluster_cases.CASES,
    *backend_cases.CASES,
    *data_cases.CASES,
    *env_cases.CASES,
    *health_cases.CASES,
]


def spaced(overrides: str) -> list[str]:
    """The overrides of a line. YAML wants a blank after a colon; the table has none, so that blanks part overrides.

    `val:` is the beginning of a metric's name.
    """
    return [re.sub(r"(?<!\bval):(?!//)", ": ", text).replace(",", ", ") for text in overrides.split()]


@pytest.mark.parametrize(("rule", "recipe", "broken", "mended", "names"), CASES)
def test_a_broken_rule_names_keys_values_and_way_out(rule: str, recipe: str, broken: str, mended: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load(recipe, spaced(broken))
    found = [message for message in caught.value.messages if all(part in message for part in names.split("|"))]
    assert found, f"{rule}: no message names {names}: {caught.value}"
    load(recipe, [*spaced(broken), *spaced(mended)])


@pytest.mark.parametrize("rule", [*ALGORITHM_RULES, *SIZE_RULES, *MODEL_RULES, *DATA_RULES, *ENV_RULES, *CLUSTER_RULES])
def test_every_rule_has_a_case(rule: Callable):
    assert rule.__name__ in {case[0] for case in CASES}


@pytest.mark.parametrize(
    ("override", "names"), [("ppo=null", "give one"), ("grpo={}", "remove one (ppo=null or grpo=null)")]
)
def test_exactly_one_of_ppo_and_grpo(override: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load(PPO, [override])
    (message,) = caught.value.messages
    assert names in message


def test_all_broken_rules_come_at_once():
    with pytest.raises(ConfigError) as caught:
        load(PPO, ["value=null", "policy.generation.top_k=5", "reference={}", "policy.train_global_batch_size=7"])
    assert len(caught.value.messages) == 4
