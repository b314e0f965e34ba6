"""The effective config as text, for people and for a run directory."""

from pathlib import Path

import pytest

from tandem.config.check import derived, render, to_yaml
from tandem.config.load import load

BASE = str(Path(__file__).with_name("base.yaml"))
AWKWARD = [
    "plain",
    "1e3",
    "null",
    "yes",
    "${seed}",
    "\\${seed}",
    "a\\\\${b",
    "x: y # z",
    "'\"",
    "é\n\ttab",
    "  edge ",
    "{question}",
]


def test_every_value_is_shown_with_its_origin():
    lines = render(load(BASE, ["policy.optimizer.lr=1e-5"])).plain.splitlines()
    rows = {line.partition("#")[0].rstrip(): line.partition("# ")[2] for line in lines}
    assert rows["    lr: 1e-05"] == "command line"
    assert rows["  max_num_steps: 20"].endswith("tests/config/base.yaml:5")
    assert rows["seed: 42"] == "default"
    assert rows["  dynamic_sampling_max_gen_batches: 10"] == "default, no effect here"


def test_derived_numbers_are_those_of_the_run():
    sampler = ["async_rl.sampler.max_lookahead_versions=2", "async_rl.sampler.warmup_lookahead_versions=4"]
    correction = "loss_fn.importance_sampling_correction={name: tis, ratio_max: 2}"
    config = load(BASE, [*sampler, correction, "ppo.policy_training_start_step=5", "ppo.ppo_epochs=3"]).config
    numbers = dict(derived(config))
    assert numbers["samples a step"].startswith("32 ")
    assert numbers["optimizer steps a step"] == "6 (3 x 2 mini-batches)"
    assert numbers["optimizer steps, policy"] == "90"
    assert numbers["optimizer steps, value"] == "120"
    assert numbers["tickets"].startswith("24 ")
    assert numbers["critic warm-up"] == "steps 0 to 4, 40 tickets at first"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("quickstart", []),
        ("quickstart_grpo", []),
        ("quickstart_async", []),
        ("gsm8k_ppo", ["policy.model_name=m", "data.train.path=/a b/c.jsonl"]),
        (
            BASE,
            [
                "checkpointing.enabled=false",
                "loss_fn.ratio=none",
                "policy.tokenizer.chat_template_kwargs={a: '1', b: 2.0}",
            ],
        ),
        (BASE, ["ppo.val_at_start=false", "loss_fn.kl_input_clamp_value=null", "logger.num_val_samples_to_print=0"]),
        (BASE, ["loss_fn.reference_policy_kl_penalty=0.1", "reference={}", "policy.generation.stop_token_ids=[3, 4]"]),
        (BASE, ["data.train={name: gsm8k, path: x.jsonl, prompt_template: 'Solve: {question}'}"]),
        (
            BASE,
            [
                "data.train={name: mixture, sources: {a: {name: gsm8k, path: x}, b: {name: hub, dataset: o/d}}}",
                "data.train.weights={a: 1, b: 2.5}",
                "data.validation={name: sets, sets: {aime_2024: {name: aime_2024}, g-1: {name: gsm8k, split: test}}}",
            ],
        ),
        (BASE, ["value_loss_fn={name: hl_gauss, num_bins: 7}", "logger.wandb={project: default}"]),
    ],
)
def test_the_yaml_of_a_config_loads_to_an_equal_config(tmp_path: Path, recipe: str, overrides: list[str]):
    config = load(recipe, overrides).config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(str(path)).config == config


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives_the_yaml(tmp_path: Path, text: str):
    config = load(BASE).config
    config = config.model_copy(update={"name": text, "data": config.data.model_copy(update={"system_prompt": text})})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(str(path)).config == config
