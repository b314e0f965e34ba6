"""Which implementation is the environment of a recipe, and how a conversation goes on in its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tandem.config import Config
from tandem.config.env import PythonEnv, SingleTurnEnv, ToolCallFormat, ToolsEnv
from tandem.data.chat import Chat
from tandem.data.dialogue import Dialogue
from tandem.envs.multi_turn import MultiTurn
from tandem.envs.python_env import PythonPartner, load_environment
from tandem.envs.single_turn import SingleTurn
from tandem.envs.tool_calls import format_shown
from tandem.envs.tools import Toolbox, ToolPartner, load_tools
from tandem.envs.verifiers import build_verifier
from tandem.launch.cast import AS_BUILT, Cast
from tandem.roles import Environment, Verifier
from tandem.types import Prompt


def described_tools(config: Config) -> Sequence[Mapping[str, Any]]:
    """The schemas that the chat template puts into every prompt."""
    env = config.env
    return [tool.schema for tool in load_tools(env)] if isinstance(env, ToolsEnv) and env.describe_tools else []


def build_environment(config: Config, chat: Chat, cast: Cast = AS_BUILT) -> Environment:
    """The environment of `env`. A user's code is imported and checked here, before anything is generated."""
    env = config.env
    match env:
        case SingleTurnEnv():
            verifier = cast.verifier(build_verifier(env.verifier))
            return SingleTurn(verifier, chat.decode, score_timeout_s=env.score_timeout_s)
        case ToolsEnv():
            return tools_environment(config, env, chat, cast.verifier(build_verifier(env.verifier)))
        case PythonEnv():
            return python_environment(config, env, chat)


def tools_environment(config: Config, env: ToolsEnv, chat: Chat, verifier: Verifier) -> MultiTurn:
    """Episodes with tools, all of which share one toolbox and one verifier."""
    toolbox = Toolbox(load_tools(env), env)
    convention = env.tool_call_format or shown_format(chat)
    speech = dialogue(config, chat, env.result_role)

    async def open_partner(prompt: Prompt) -> ToolPartner:
        return ToolPartner(prompt, toolbox, verifier, convention, env.score_timeout_s)

    length = config.policy.max_total_sequence_length
    return MultiTurn(open_partner, speech, max_turns=env.max_turns, max_tokens=length, on_close=verifier.close)


def python_environment(config: Config, env: PythonEnv, chat: Chat) -> MultiTurn:
    """Episodes with a new object of the user's class each."""
    make = load_environment(env)

    async def open_partner(prompt: Prompt) -> PythonPartner:
        return await PythonPartner(prompt, make, env).open()

    speech = dialogue(config, chat, "user")
    return MultiTurn(open_partner, speech, max_turns=env.max_turns, max_tokens=config.policy.max_total_sequence_length)


def dialogue(config: Config, chat: Chat, role: Literal["tool", "user"]) -> Dialogue:
    """How replies of a role are written down."""
    return Dialogue(chat, (chat.eos_token_id, *config.policy.generation.stop_token_ids), role)


def shown_format(chat: Chat) -> ToolCallFormat:
    """How the chat template says that tools are called."""
    shown = format_shown(chat.template)
    if shown is None:
        raise ValueError(
            "the chat template shows no way of calling tools that is known here: set env.tool_call_format to hermes,"
            " llama3_json or mistral, whichever the prompt asks for"
        )
    return shown
