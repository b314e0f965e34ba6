"""How a config comes to be: inheritance, overrides, interpolation, unions, and where every value comes from."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.algorithm import Gae, GrpoEstimator
from tandem.config.errors import ConfigError
from tandem.config.load import load

HERE = Path(__file__).parent
BASE = str(HERE / "base.yaml")


def recipe(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_origins_are_default_file_inherited_file_or_command_line(tmp_path: Path):
    child = recipe(tmp_path, "child.yaml", f"defaults: {BASE}\n\nppo:\n  max_num_steps: 30\n")
    loaded = load(child, ["seed=7", "policy.optimizer.lr=1e-5"])
    shown = {key: str(origin).removeprefix(f"{tmp_path}/") for key, origin in loaded.origins.items()}
    assert shown["cluster.device"] == shown["policy.optimizer.eps"] == "default"
    assert shown["ppo.max_num_steps"] == "child.yaml:4"
    assert shown["ppo.num_prompts_per_step"].endswith("tests/config/base.yaml:3")
    assert shown["policy.generation.max_new_tokens"].endswith("tests/config/base.yaml:11")
    assert shown["seed"] == shown["policy.optimizer.lr"] == shown["policy.optimizer"] == "command line"
    assert loaded.config.policy.optimizer.lr == 1e-5
    assert set(loaded.origins) == set(loaded.values)


def test_later_defaults_go_over_earlier_ones_and_the_recipe_over_all(tmp_path: Path):
    recipe(tmp_path, "one.yaml", f"defaults: {BASE}\nname: one\nseed: 1\nrun_dir: one\n")
    recipe(tmp_path, "two.yaml", "name: two\nseed: 2\n")
    config = load(recipe(tmp_path, "child.yaml", "defaults: [one.yaml, two.yaml]\nname: child\n")).config
    assert (config.name, config.seed, config.run_dir) == ("child", 2, "one")


def test_a_shipped_recipe_is_inherited_by_name(tmp_path: Path):
    assert load(recipe(tmp_path, "child.yaml", "defaults: quickstart\nseed: 1\n")).config.name == "quickstart"


@pytest.mark.parametrize(
    ("defaults", "reason"),
    [
        ("child.yaml", "inherit in a circle: .*child.yaml -> .*child.yaml"),
        ("other.yaml", "inherit in a circle: .*child.yaml -> .*other.yaml -> .*child.yaml"),
        ("quickstrt", r"defaults \(.*child.yaml:1\): no recipe 'quickstrt'; did you mean quickstart"),
        ("{a: 1}", "wanted a recipe's name or path"),
        ("[1]", "wanted a recipe's name or path"),
    ],
)
def test_defaults_that_lead_nowhere_are_refused(tmp_path: Path, defaults: str, reason: str):
    recipe(tmp_path, "other.yaml", "defaults: child.yaml\n")
    with pytest.raises(ConfigError, match=reason):
        load(recipe(tmp_path, "child.yaml", f"defaults: {defaults}\n"))


def test_the_last_of_two_overrides_wins():
    assert load(BASE, ["seed=1", "seed=2"]).config.seed == 2


def test_null_removes_an_optional_section():
    overrides = ["value=null", "value_loss_fn=null", "ppo.adv_estimator.name=rloo"]
    config = load(BASE, overrides).config
    assert config.value is None
    assert config.value_loss_fn is None


def test_a_key_of_a_default_variant_needs_no_name():
    estimator = load(BASE, ["ppo.adv_estimator.gae_lambda=0.9"]).config.algorithm.adv_estimator
    assert estimator == Gae(gae_lambda=0.9)


def test_another_variant_drops_what_the_recipe_wrote_for_the_old_one(tmp_path: Path):
    parent = f"defaults: {HERE / 'grpo.yaml'}\ngrpo:\n  adv_estimator: {{name: gdpo, reward_weights: {{a: 1}}}}\n"
    path = recipe(tmp_path, "gdpo.yaml", parent)
    estimator = load(path, ["grpo.adv_estimator.name=grpo"]).config.algorithm.adv_estimator
    assert estimator == GrpoEstimator()
    child = recipe(tmp_path, "child.yaml", f"defaults: {path}\ngrpo: {{adv_estimator: {{name: rloo}}}}\n")
    assert load(child).config.algorithm.adv_estimator.name == "rloo"


def test_the_same_variant_keeps_what_the_recipe_wrote(tmp_path: Path):
    path = recipe(tmp_path, "a.yaml", f"defaults: {BASE}\nvalue_loss_fn: {{name: mse, cliprange: 0.1}}\n")
    loss = load(path, ["value_loss_fn.name=mse", "value_loss_fn.scale=2.0"]).config.value_loss_fn
    assert loss is not None
    assert loss.model_dump() == {"name": "mse", "scale": 2.0, "cliprange": 0.1}


def test_what_the_command_line_sets_for_the_old_variant_is_refused_in_any_order():
    pair = ["ppo.adv_estimator.gae_lambda=0.9", "ppo.adv_estimator.name=rloo"]
    for overrides in (pair, pair[::-1]):
        with pytest.raises(ConfigError, match=r"gae_lambda \(command line\): unknown key; it belongs to .*name = gae"):
            load(BASE, [*overrides, "value=null", "value_loss_fn=null"])


def test_default_takes_a_key_back(tmp_path: Path):
    path = recipe(tmp_path, "a.yaml", f"defaults: {BASE}\nseed: 1\npolicy: {{optimizer: {{lr: 1.0e-4}}}}\n")
    loaded = load(path, ["seed=default", "policy.optimizer=default"])
    assert loaded.config.seed == 42
    assert str(loaded.origins["policy.optimizer.lr"]) == "default"
    # A key of a free mapping has no default: there it is a word like others.
    words = load(path, ["policy.tokenizer.chat_template_kwargs.mode=default"]).config.policy.tokenizer
    assert words.chat_template_kwargs == {"mode": "default"}


def test_interpolation_sees_recipe_overrides_and_defaults():
    overrides = [
        "policy.train_global_batch_size=${mul:${ppo.num_prompts_per_step},${ppo.num_generations_per_prompt}}",
        "ppo.num_prompts_per_step=6",
        "seed=${ppo.max_num_epochs}",
        "name=seed-${seed}",
    ]
    config = load(BASE, overrides).config
    assert config.policy.train_global_batch_size == 24
    assert config.name == "seed-1000"


@pytest.mark.parametrize(
    ("sum_of_two", "result"), [("add:4,3", 7), ("sub:4,3", 1), ("mul:4,3", 12), ("max:4,3", 4), ("div:6,3", 2.0)]
)
def test_a_value_can_be_a_sum_of_two_others(sum_of_two: str, result: float):
    assert load(BASE, [f"policy.max_grad_norm=${{{sum_of_two}}}"]).config.policy.max_grad_norm == result


def test_a_copied_section_has_the_origin_of_the_copy_where_it_differs_from_defaults():
    loaded = load(BASE, ["policy.optimizer.lr=1e-5", "value.optimizer=${policy.optimizer}"])
    assert loaded.config.value is not None
    assert loaded.config.value.optimizer.lr == 1e-5
    assert str(loaded.origins["value.optimizer.lr"]) == "command line"
    assert str(loaded.origins["value.optimizer.eps"]) == "default"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${no.such}", "'no.such' not found"),
        ("${name}", "Recursive"),
        ("${mul:a,2}", "mul takes two numbers, got a and 2"),
        ("${pow:1,2}", "Unsupported interpolation type pow"),
        ("${div:1,0}", "division by zero"),
    ],
)
def test_an_interpolation_that_fails_is_a_mistake_of_its_key(value: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        load(BASE, [f"name={value}", "sed=1"])
    assert len(caught.value.messages) == 2
    assert any(message.startswith("name (command line)") and reason in message for message in caught.value.messages)


def test_importing_the_config_loads_no_torch():
    program = "import sys, tandem.config, tandem.config.load, tandem.config.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
