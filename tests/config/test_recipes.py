"""Finding recipes, and what ships."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from tandem.config.check import render
from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.placement import placement_of
from tandem.config.recipes import find_recipe, shipped_recipes

SHIPPED = sorted(shipped_recipes())
# Said although they are the defaults: how large a step is where people read a recipe first, and a learning rate. So is
# the name of a variant.
SPELLED_OUT = {"ppo.num_prompts_per_step", "ppo.num_generations_per_prompt", "policy.optimizer.lr"}
RECIPES_PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def left_open(name: str) -> list[str]:
    """The keys that a shipped recipe leaves to its user; whatever else is wrong with it is an error."""
    try:
        load(name)
    except ConfigError as error:
        keys = [message.partition(" must be given")[0] for message in error.messages]
        assert set(keys) <= {"policy.model_name"}
        return keys
    return []


def test_a_shipped_name_is_its_file():
    assert find_recipe("quickstart") == shipped_recipes()["quickstart"]


def test_a_path_is_that_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    assert find_recipe(str(path)) == path


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("quikstart", "quickstart"),
        ("quickstart.yml", "quickstart"),
        ("recipes/quickstrt.yaml", "quickstart"),
        ("ppo_qwen2.5_1.5_gsm8k", "ppo_qwen2.5_1.5b_gsm8k"),
    ],
)
def test_a_missing_recipe_names_the_nearest_and_lists_what_ships(wrong: str, near: str):
    with pytest.raises(ConfigError) as caught:
        find_recipe(wrong)
    (message,) = caught.value.messages
    assert wrong in message
    assert f"did you mean {near}?" in message
    assert all(name in message for name in shipped_recipes())


def test_a_folder_is_no_recipe(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder"):
        find_recipe(str(tmp_path))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_passes_the_check_and_stays_short(name: str):
    loaded = load(name, [f"{key}=module:name" for key in left_open(name)])
    assert render(loaded).plain
    assert loaded.config.name == name
    text = shipped_recipes()[name].read_text()
    assert len(text.splitlines()) <= 40
    assert text.startswith("# ")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_states_only_differences(name: str, tmp_path: Path):
    """Each key of it, taken away, changes the run or is missed."""
    path = shipped_recipes()[name]
    written = yaml.safe_load(path.read_text())
    given = [f"{key}=module:name" for key in left_open(name)]
    whole = load(name, given).config
    for key in leaves_of(written):
        if key == ("defaults",) or key[-1] == "name" or ".".join(key) in SPELLED_OUT | set(left_open(name)):
            continue
        shorter = deepcopy(written)
        inside = shorter
        for part in key[:-1]:
            inside = inside[part]
        del inside[key[-1]]
        file = tmp_path / "shorter.yaml"
        file.write_text(yaml.safe_dump(shorter))
        try:
            config = load(str(file), given).config
        except ConfigError:
            continue
        assert config != whole, ".".join(key)


def leaves_of(value: dict, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaves_of(inner, (*above, name))
        else:
            yield *above, name


def test_the_docs_list_every_shipped_recipe():
    listed = re.findall(r"^\| `([\w.]+)` \|", RECIPES_PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == SHIPPED


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("ppo_qwen2.5_1.5b_gsm8k_8gpu", {"actor": 8, "critic": 8, "engine": 8}),
        ("ppo_qwen2.5_1.5b_gsm8k_2x8_async", {"actor": 8, "critic": 8, "engine": 8}),
        ("ppo_dsr1_7b_math", {"actor": 64, "critic": 64, "engine": 64, "reference": 64}),
    ],
)
def test_the_large_recipes_have_a_place_on_the_machines_they_name(name: str, places: dict[str, int]):
    placement = placement_of(load(name, [f"{key}=module:name" for key in left_open(name)]).config)
    assert {part: len(slots) for part, slots in placement.items()} == places
    shared = set(placement["engine"]) & set(placement["actor"])
    assert (not shared) == name.endswith("_async")


def test_what_a_recipe_leaves_open_must_come_from_the_command_line():
    with pytest.raises(ConfigError) as caught:
        load("gsm8k_ppo")
    assert caught.value.messages == ("policy.model_name must be given, e.g. policy.model_name=path/to/model",)
