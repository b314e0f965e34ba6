"""What a user reads when a key or a value is wrong."""

from contextlib import suppress
from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.schema import all_keys

BASE = str(Path(__file__).with_name("base.yaml"))


def messages(*overrides: str, recipe: str = BASE) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    return caught.value.messages


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.optimzer.lr=1", "policy.optimzer (command line): unknown key; did you mean policy.optimizer?"),
        ("adv_estimater=gae", "adv_estimater (command line): unknown key; did you mean ppo.adv_estimator?"),
        ("polcy={}", "polcy (command line): unknown key; did you mean policy?"),
        ("policy.backend.fp8=true", "policy.backend.fp8 (command line): FP8 is not supported yet; take the key out"),
        (
            "policy.backend={name: megatron, virtual_pipeline_model_parallel_size: 2}",
            "policy.backend.virtual_pipeline_model_parallel_size (command line): the interleaved pipeline schedule is "
            "not supported yet; take the key out",
        ),
        (
            "policy.backend={name: megatron, expert_model_parallel_size: 2}",
            "policy.backend.expert_model_parallel_size (command line): expert parallel is not supported yet; "
            "take the key out",
        ),
        (
            "policy.backend={name: megatron, transformer_impl: transformer_engine}",
            "policy.backend.transformer_impl (command line): a choice of layers (Megatron-Core's own, without "
            "TransformerEngine) is not supported yet; take the key out",
        ),
        (
            "policy.offload_optimizer_for_logprob=true",
            "policy.offload_optimizer_for_logprob (command line): unknown key; write policy.offload=optimizer, which "
            "keeps the moments away while the model infers",
        ),
        (
            "policy.generation.max_tokens=9",
            "policy.generation.max_tokens (command line): unknown key; did you mean policy.generation.max_new_tokens?",
        ),
        ("ppo_epochs=2", "ppo_epochs (command line): unknown key; did you mean ppo.ppo_epochs?"),
        ("ppo.lr=1", "ppo.lr (command line): unknown key; did you mean policy.optimizer.lr or value.optimizer.lr?"),
        (
            "ppo.adv_estimator.minus_baseline=true",
            "ppo.adv_estimator.minus_baseline (command line): unknown key; "
            "it belongs to ppo.adv_estimator.name = reinforce_plus_plus, here the name is gae",
        ),
        (
            "async_rl.quux=1",
            "async_rl.quux (command line): unknown key; async_rl knows sampler, weight_update, "
            "recompute_kv_cache_after_weight_updates, discard_partial_rollouts, min_groups_for_streaming_train, "
            "min_step_batch_fraction, stall_timeout_s, on_stall",
        ),
        (
            "env.name=verifiers",
            "env.name (command line): environments of the package verifiers ask an endpoint over HTTP for what the "
            "policy writes, and the engines here have none: write the task as env.name=tools or env.name=python",
        ),
        (
            "env.name=openenv",
            "env.name (command line): an OpenEnv server is called from a class of your own, env.name=python: "
            "docs/environments.md has one",
        ),
        (
            "env.name=tool",
            "env.name (command line): no env is named tool; did you mean tools? Known: single_turn, tools, python",
        ),
        ("seed=-1", "seed (command line): got -1, wanted a whole number >= 0"),
        ("seed=true", "seed (command line): got true, wanted a whole number >= 0"),
        ("seed=1e3", "seed (command line): got 1000.0, wanted a whole number >= 0; write 1000"),
        ("seed='7'", 'seed (command line): got "7", wanted a whole number >= 0; without quotes'),
        ("name=7", "name (command line): got 7, wanted text; put it in quotes"),
        (
            "data.prompt_template={question}",
            "data.prompt_template (command line): got {question: null}, wanted text; put it in quotes",
        ),
        ("ppo.target_kl=0", "ppo.target_kl (command line): got 0, wanted a number > 0 or null"),
        (
            "policy.generation.top_p=1.5",
            "policy.generation.top_p (command line): got 1.5, wanted a number > 0 and <= 1",
        ),
        ("policy.optimizer.lr=.inf", "policy.optimizer.lr (command line): got inf, wanted a number > 0"),
        (
            "policy.optimizer.betas=[0.9]",
            "policy.optimizer.betas (command line): got [0.9], wanted a list of 2, each a number >= 0 and < 1",
        ),
        (
            "policy.generation.stop_token_ids=[a]",
            "policy.generation.stop_token_ids (command line): got [a], wanted a list, each a whole number",
        ),
        ("logger.tensorboard=maybe", "logger.tensorboard (command line): got maybe, wanted true or false"),
        (
            "policy.optimizer=null",
            "policy.optimizer (command line): got null, wanted a section; leave it out for its defaults",
        ),
        ("value=true", "value (command line): got true, wanted a section or null; write {} for its defaults"),
        (
            "policy.precision=bf16",
            "policy.precision (command line): got bf16; did you mean bfloat16? Known: float32, bfloat16",
        ),
        (
            "env.verifier.name=gsm",
            "env.verifier.name (command line): no verifier is named gsm; did you mean gsm8k? "
            "Known: arithmetic, gsm8k, dapo_math, math_verify, exact, regex, format, length, python, reward_model, "
            "llm_judge, code, reasoning_gym, weighted_sum",
        ),
        (
            "env.verifier={name: weighted_sum, components: {a b: {verifier: {name: gsm8k}}}}",
            'env.verifier.components.a b (command line): "a b" is no name: use letters, digits, _ and -',
        ),
        (
            "env.verifier={name: weighted_sum, components: {}}",
            "env.verifier.components (command line): got {}, wanted a mapping of names to a section",
        ),
        (
            "env.verifier={name: weighted_sum, components: {a: {wieght: 1.0, verifier: {name: gsm8k}}}}",
            "env.verifier.components.a.wieght (command line): unknown key; "
            "did you mean env.verifier.components.a.weight?",
        ),
        (
            "env.verifier.name=weighted_sum",
            "env.verifier.components must be given, e.g. env.verifier.components={right: {verifier: {name: gsm8k}}}",
        ),
        (
            "data.validation={}",
            "data.validation.name must be given: one of arithmetic, file, hub, gsm8k, "
            "dapo_math_17k, aime_2024, math_500, openmathinstruct2, reasoning_gym, sets",
        ),
        (
            "data.validation={name: file}",
            "data.validation.path must be given, e.g. data.validation.path=.../train.jsonl",
        ),
        ("loss_fn.adaptive_kl={target: 1}", "loss_fn.adaptive_kl.horizon must be given: a whole number >= 1"),
        ("data=null", "data (command line): got null, wanted a section; leave it out for its defaults"),
        ("run_dir=???", "run_dir must be given: text or null"),
    ],
)
def test_a_wrong_key_or_value_is_said_in_words(override: str, message: str):
    assert messages(override) == (message,)


def test_a_missing_section_says_what_it_needs(tmp_path: Path):
    path = tmp_path / "empty.yaml"
    path.write_text("name: x\n")
    found = messages(recipe=str(path))
    assert "data must be given: a section with train" in found
    assert "policy must be given: a section with model_name, train_global_batch_size" in found


def test_an_unknown_key_of_a_recipe_has_its_line(tmp_path: Path):
    path = tmp_path / "typo.yaml"
    path.write_text(f"defaults: {BASE}\npolicy:\n  optimzer: {{lr: 1.0}}\n")
    (message,) = messages(recipe=str(path))
    assert message.endswith("typo.yaml:3): unknown key; did you mean policy.optimizer?")


def test_all_mistakes_come_at_once():
    found = messages("sed=1", "ppo.ppo_epochs=0", "env.verifier.name=x", "name=???", "run_dir=${nope}")
    assert len(found) == 5


def test_unknown_keys_do_not_hide_broken_rules():
    found = messages("sed=1", "policy.train_global_batch_size=5", "value=null")
    assert len(found) == 3


@pytest.mark.parametrize("value", ["null", "-1", "[1]", "{a: {b: 1}}", "${policy}", "???", "default", "{name: [1]}"])
def test_whatever_is_written_the_error_is_a_config_error(value: str):
    for key in sorted(set(all_keys()))[::12]:
        with suppress(ConfigError):
            load(BASE, [f"{key}={value}"])
