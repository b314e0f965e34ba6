"""The effective config as text: for people with origins and derived numbers, for a run directory as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omegaconf import OmegaConf
from pydantic import BaseModel
from rich.text import Text

from tandem.config.algorithm import Gae
from tandem.config.env import Env, PythonEnv, SingleTurnEnv, ToolsEnv
from tandem.config.idle import idle_keys
from tandem.config.loaded import Loaded, holds_sections, named_sections
from tandem.config.run import Config
from tandem.config.schema import Plain, plain
from tandem.config.show import shown
from tandem.config.tree import DEFAULT

WIDEST = 44  # columns; a longer line pushes its own origin to the right


def render(loaded: Loaded) -> Text:
    """Every value with its origin, defaults dimmed, then the numbers that follow from them. Print it with soft_wrap."""
    lines = list(_lines(loaded))
    width = min(WIDEST, max(len(left) for left, _ in lines)) + 2
    text = Text()
    for left, right in lines:
        style = "dim" if right.startswith(str(DEFAULT)) else ""
        text.append(f"{left:<{width}}# {right}\n", style)
    text.append("\nfollows from it\n", "bold")
    numbers = list(derived(loaded.config))
    width = max(len(name) for name, _ in numbers) + 2
    for name, value in numbers:
        text.append(f"{name:<{width}}{value}\n")
    text.rstrip()
    return text


def to_yaml(config: Config) -> str:
    """YAML that loads to an equal config. Keys that would be refused as without effect are left out."""
    idle = idle_keys(Loaded(config, {}))
    return OmegaConf.to_yaml(OmegaConf.create(escaped(_without(config, idle))))


def derived(config: Config) -> Iterator[tuple[str, str]]:
    """What a reader would otherwise compute by hand."""
    algorithm, sampler = config.algorithm, config.async_rl.sampler
    groups, updates = algorithm.num_prompts_per_step, config.optimizer_steps_per_step
    frozen = config.policy_training_start_step
    yield (
        "samples a step",
        f"{algorithm.samples_per_step} ({groups} prompts x {algorithm.num_generations_per_prompt})",
    )
    yield "samples in all", f"{algorithm.samples_per_step * algorithm.max_num_steps} in {algorithm.max_num_steps} steps"
    yield (
        "optimizer steps a step",
        f"{updates} ({algorithm.ppo_epochs} x {updates // algorithm.ppo_epochs} mini-batches)",
    )
    yield "optimizer steps, policy", str(updates * (algorithm.max_num_steps - frozen))
    if config.value is not None:
        yield "optimizer steps, value", str(updates * algorithm.max_num_steps)
        yield "value starts from", config.value.model_name or f"{config.policy.model_name} (the policy's backbone)"
    if isinstance(algorithm.adv_estimator, Gae):
        yield "lambda of policy, value", _lambdas(algorithm.adv_estimator)
    if frozen:
        yield "critic warm-up", f"steps 0 to {frozen - 1}, {sampler.tickets(groups, frozen)} tickets at first"
    tickets = sampler.tickets(groups, 0)
    yield "lead", f"{tickets // groups - 1} versions" if tickets > groups else "0 versions: synchronous"
    yield "tickets", f"{tickets} prompts in flight or waiting at most"
    yield (
        "prompt tokens at most",
        str(config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens),
    )
    yield (
        "deadlines",
        f"writing one response {config.policy.generation.timeout_s:g} s, {_env_deadlines(config.env)}, "
        f"nothing moves {config.async_rl.stall_timeout_s:g} s",
    )


def _env_deadlines(env: Env) -> str:
    match env:
        case PythonEnv():
            return f"one call of the environment {env.timeout_s:g} s"
        case ToolsEnv():
            return f"a call of a tool {env.tool_timeout_s:g} s, scoring {env.score_timeout_s:g} s"
        case SingleTurnEnv():
            return f"scoring it {env.score_timeout_s:g} s"


def _lines(loaded: Loaded) -> Iterator[tuple[str, str]]:
    idle = idle_keys(loaded)
    for key, value in loaded.values.items():
        *parents, name = key.split(".")
        left = "  " * len(parents) + name + ":"
        if not holds_sections(value):
            left += f" {shown(value)}"
        yield left, f"{loaded.origins[key]}{', no effect here' if key in idle else ''}"


def _lambdas(estimator: Gae) -> str:
    alpha = estimator.length_adaptive_alpha
    policy = f"1 - 1 / ({alpha:g} x length)" if alpha else f"{estimator.lambda_policy:g}"
    return f"{policy}, {estimator.lambda_value:g}"


def _without(value: Plain, idle: dict[str, str], prefix: str = "") -> Plain:
    entries = list(value) if isinstance(value, BaseModel) else list(named_sections(value))
    if not entries:
        return plain(value)
    return {
        name: _without(inner, idle, f"{prefix}{name}.")
        for name, inner in entries
        if not (prefix + name in idle and inner)
    }


def escaped(value: Plain) -> Plain:
    r"""Text that holds `${` as it is: OmegaConf reads `\${`."""
    match value:
        case dict():
            return {key: escaped(inner) for key, inner in value.items()}
        case list():
            return [escaped(inner) for inner in value]
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case _:
            return value
