"""Rules of environments and verifiers: patterns that can be read, deadlines that fit, weights that have an effect."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tandem.config.algorithm import Gdpo
from tandem.config.env import (
    FormatReward,
    LengthReward,
    LlmJudgeVerifier,
    PythonEnv,
    PythonVerifier,
    RegexVerifier,
    RewardModelVerifier,
    Single,
    WeightedSum,
)
from tandem.config.loaded import Loaded

VERIFIER = "env.verifier"


def verifiers(loaded: Loaded) -> Iterator[tuple[str, Single]]:
    """Every verifier with its key: the one, those of a weighted sum, or none."""
    verifier = loaded.config.verifier
    if isinstance(verifier, WeightedSum):
        yield from (
            (f"{VERIFIER}.components.{name}.verifier", part.verifier) for name, part in verifier.components.items()
        )
    elif verifier is not None:
        yield VERIFIER, verifier


def patterns(loaded: Loaded) -> Iterator[str]:
    """Every pattern is one."""
    for key, verifier in verifiers(loaded):
        match verifier:
            case RegexVerifier(pattern=pattern) | FormatReward(pattern=pattern):
                name = f"{key}.pattern"
            case LlmJudgeVerifier(score_pattern=pattern):
                name = f"{key}.score_pattern"
            case _:
                continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{loaded.at(name)} is no regular expression: {error}; mend it, in single quotes so that \\ stays"


def score_deadlines(loaded: Loaded) -> Iterator[str]:
    """What a verifier may take fits into the time that a score has; else its own limit would never be reached."""
    env = loaded.config.env
    if isinstance(env, PythonEnv):
        return
    total, limit = f"{loaded.at('env.score_timeout_s')}", env.score_timeout_s
    for key, verifier in verifiers(loaded):
        match verifier:
            case LlmJudgeVerifier(max_retries=retries, request_timeout_s=each, retry_backoff_s=backoff):
                longest = (retries + 1) * each + backoff * (2**retries - 1)
                if longest > limit:
                    yield (
                        f"{loaded.at(f'{key}.request_timeout_s')}, {loaded.at(f'{key}.max_retries')} and "
                        f"{loaded.at(f'{key}.retry_backoff_s')} take up to {longest:g} s, more than {total}: "
                        f"lower one of them, or set env.score_timeout_s={longest:g} or more"
                    )
            case _:
                if f"{key}.timeout_s" in loaded.values and loaded.values[f"{key}.timeout_s"] > limit:
                    yield (
                        f"{loaded.at(f'{key}.timeout_s')} is more than {total}: lower the first, or raise the second"
                    )


def ranges(loaded: Loaded) -> Iterator[str]:
    """A range is not empty."""
    for key, verifier in verifiers(loaded):
        match verifier:
            case LengthReward(min_chars=low, max_chars=high) if low > high:
                yield f"{loaded.at(f'{key}.min_chars')} is more than {loaded.at(f'{key}.max_chars')}: lower the first"
            case LlmJudgeVerifier(min_score=low, max_score=high) if low >= high:
                bounds = f"{loaded.at(f'{key}.min_score')} is not below {loaded.at(f'{key}.max_score')}"
                yield f"{bounds}: give the range that the judge has"


def addresses(loaded: Loaded) -> Iterator[str]:
    """An endpoint is a URL, a device one that torch has."""
    for key, verifier in verifiers(loaded):
        match verifier:
            case LlmJudgeVerifier(base_url=url) if not re.match(r"https?://[^/]", url):
                yield f"{loaded.at(f'{key}.base_url')} is no address of a server: write it as http://HOST:PORT/v1"
            case RewardModelVerifier(device=device) if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
                yield f"{loaded.at(f'{key}.device')} is no device: set it to auto, cpu, cuda, or cuda:1"


def judge_prompt(loaded: Loaded) -> Iterator[str]:
    """A judge sees what it is to judge."""
    for key, verifier in verifiers(loaded):
        if isinstance(verifier, LlmJudgeVerifier) and "{response}" not in verifier.prompt:
            yield f"{loaded.at(f'{key}.prompt')} never shows the response: write {{response}} where it belongs"


def component_weights(loaded: Loaded) -> Iterator[str]:
    """A weight of 0 is no part of a sum; gdpo has weights of its own, and needs parts."""
    verifier, estimator = loaded.config.verifier, loaded.config.algorithm.adv_estimator
    own = f"{loaded.algorithm}.adv_estimator"
    gdpo = isinstance(estimator, Gdpo)
    if gdpo and verifier is not None and not isinstance(verifier, WeightedSum | PythonVerifier):
        yield (
            f"{loaded.at(f'{own}.name')} learns from the parts of a reward, but {loaded.at(f'{VERIFIER}.name')} gives"
            " one number: set env.verifier.name=weighted_sum with components, or choose another estimator"
        )
    if not isinstance(verifier, WeightedSum):
        return
    for name, part in verifier.components.items():
        if part.weight == 0:
            key = f"{VERIFIER}.components.{name}"
            yield f"{loaded.at(f'{key}.weight')} gives {key} no effect: give it a weight, or remove it"
    if isinstance(estimator, Gdpo):
        weights = {name: part.weight for name, part in verifier.components.items()}
        chosen = estimator.reward_weights or dict.fromkeys(weights, 1.0)
        if chosen.keys() != weights.keys():
            yield (
                f"{loaded.at(f'{own}.reward_weights')} must name the components of env.verifier, "
                f"{', '.join(weights)}: one weight each"
            )
        elif chosen != weights:
            yield (
                f"{loaded.at(f'{own}.reward_weights')}, but env.verifier.components weigh {weights}: gdpo learns by "
                "the first, what is logged is summed by the second; set both to the same"
            )


ENV_RULES = (patterns, score_deadlines, ranges, addresses, judge_prompt, component_weights)
