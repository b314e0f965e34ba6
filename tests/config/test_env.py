"""The sections of an environment: the one without a name, those with one, and what they change elsewhere."""

from pathlib import Path

import pytest

from tandem.config.check import render
from tandem.config.env import PythonEnv, SingleTurnEnv, ToolsEnv
from tandem.config.errors import ConfigError
from tandem.config.load import load

BASE = str(Path(__file__).with_name("base.yaml"))
TOOLS = "env={name: tools, tools: [calculator], verifier: {name: arithmetic}}"
PYTHON = "env={name: python, target: 'mine:Env', arguments: {level: 3}}"


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(BASE, overrides)
    return str(caught.value)


def test_without_a_name_there_is_one_turn():
    env = load(BASE, ["env.score_timeout_s=5.0"]).config.env
    assert isinstance(env, SingleTurnEnv)
    assert env.score_timeout_s == 5.0


def test_tools_and_a_class_of_ones_own():
    tools, python = load(BASE, [TOOLS]).config, load(BASE, [PYTHON]).config
    assert isinstance(tools.env, ToolsEnv)
    assert tools.env.tools == ("calculator",)
    assert isinstance(python.env, PythonEnv)
    assert python.env.arguments == {"level": 3}
    assert (tools.verifier is None, python.verifier is None) == (False, True)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["env.name=tools"], "env.verifier must be given"),
        (["env.name=tools"], "env.tools must be given, e.g. env.tools=[calculator]"),
        (["env.name=python"], "env.target must be given, e.g. env.target=my_envs:Guess"),
        ([TOOLS, "env.max_turns=1"], "wanted a whole number >= 2"),
        ([TOOLS, "env.tools=[]"], "env.tools"),
        ([TOOLS, "env.tool_call_format=xml"], "Known: hermes, llama3_json, mistral"),
        ([PYTHON, "env.verifier={name: arithmetic}"], "env.verifier"),
        (["env.max_turns=3"], "env.max_turns"),
    ],
)
def test_what_does_not_belong_together_is_refused(overrides, wanted):
    assert wanted in refused(*overrides)


def test_a_response_of_several_turns_reaches_over_the_whole_row():
    shaping = "ppo.reward_shaping={name: overlong, overlong_buffer_length: 10, max_response_length: 100}"
    assert "policy.generation.max_new_tokens = 28" in refused(shaping)
    load(BASE, [TOOLS, shaping])
    assert "policy.max_total_sequence_length = 128" in refused(TOOLS, shaping.replace("100", "200"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (TOOLS, "a call of a tool 10 s, scoring 60 s"),
        (PYTHON, "one call of the environment 60 s"),
        ("seed=1", "scoring it"),
    ],
)
def test_a_check_says_the_deadlines(override, said):
    assert said in render(load(BASE, [override])).plain


def test_gdpo_may_learn_from_the_parts_of_a_class():
    load(BASE, [PYTHON, "ppo.adv_estimator={name: gdpo}", "value=null", "value_loss_fn=null"])
