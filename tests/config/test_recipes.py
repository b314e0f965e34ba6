"""Finding recipes, and what ships."""

from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.recipes import find_recipe, shipped_recipes

NEEDED = {
    "gsm8k_ppo": ["policy.model_name=some/model", "data.train.path=rows.jsonl"],
    "gsm8k_tools": ["policy.model_name=some/model", "data.train.path=rows.jsonl"],
    "evaluate": ["policy.model_name=some/model"],
}


def test_a_shipped_name_is_its_file():
    assert find_recipe("quickstart") == shipped_recipes()["quickstart"]


def test_a_path_is_that_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    assert find_recipe(str(path)) == path


@pytest.mark.parametrize("wrong", ["quikstart", "quickstart.yml", "recipes/quickstrt.yaml"])
def test_a_missing_recipe_names_the_nearest_and_lists_what_ships(wrong: str):
    with pytest.raises(ConfigError) as caught:
        find_recipe(wrong)
    (message,) = caught.value.messages
    assert wrong in message
    assert "did you mean quickstart" in message
    assert all(name in message for name in shipped_recipes())


def test_a_folder_is_no_recipe(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder"):
        find_recipe(str(tmp_path))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_and_stays_short(name: str):
    load(name, NEEDED.get(name, []))
    assert len(shipped_recipes()[name].read_text().splitlines()) <= 40


def test_what_a_recipe_leaves_open_must_come_from_the_command_line():
    with pytest.raises(ConfigError) as caught:
        load("gsm8k_ppo")
    assert caught.value.messages == ("policy.model_name must be given, e.g. policy.model_name=path/to/model",)
