"""Sections that stand by names which the user chooses: how layers meet in them, and what is said of wrong ones."""

from pathlib import Path

import pytest

from tandem.config.data import FileData, Gsm8kData, MixtureData
from tandem.config.errors import ConfigError
from tandem.config.load import load

BASE = str(Path(__file__).with_name("base.yaml"))
TWO = """
data:
  train:
    name: mixture
    sources:
      a: {name: gsm8k, path: train.jsonl}
      b: {name: file, path: rows.csv, prompt_field: problem}
"""


@pytest.fixture
def two(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(f"defaults: {BASE}\n{TWO}")
    return str(path)


def sources(recipe: str, *overrides: str) -> dict:
    train = load(recipe, list(overrides)).config.data.train
    assert isinstance(train, MixtureData)
    return dict(train.sources)


def test_one_of_them_is_changed_by_its_name(two: str):
    found = sources(two, "data.train.sources.b.path=other.csv", "data.train.sources.c={name: arithmetic}")
    assert list(found) == ["a", "b", "c"]
    assert found["b"] == FileData(name="file", path="other.csv", prompt_field="problem")


def test_another_variant_of_one_drops_what_the_recipe_wrote_for_it(two: str):
    assert sources(two, "data.train.sources.b.name=gsm8k", "data.train.sources.b.split=test") == {
        "a": Gsm8kData(name="gsm8k", path="train.jsonl"),
        "b": Gsm8kData(name="gsm8k", split="test"),
    }


@pytest.mark.parametrize("word", ["null", "default"])
def test_one_is_taken_out(two: str, word: str):
    assert list(sources(two, f"data.train.sources.b={word}")) == ["a"]


def test_a_key_within_one_goes_back_to_its_default(two: str):
    assert sources(two, "data.train.sources.b.prompt_field=default")["b"].prompt_field == "question"


def test_a_source_instead_of_the_mixture_leaves_nothing_of_it(two: str):
    assert load(two, ["data.train={name: gsm8k}"]).config.data.train == Gsm8kData(name="gsm8k")


def test_every_value_knows_where_it_comes_from(two: str):
    loaded = load(two, ["data.train.sources.a.max_rows=5"])
    shown = {key: str(origin) for key, origin in loaded.origins.items()}
    assert set(shown) == set(loaded.values)
    assert shown["data.train.sources.a.max_rows"] == "command line"
    assert shown["data.train.sources.b.prompt_field"].endswith("two.yaml:8")
    assert shown["data.train.sources.b.max_rows"] == "default"


def test_values_can_refer_to_one(two: str):
    loaded = load(two, ["data.validation={name: file, path: '${data.train.sources.b.path}'}"])
    assert loaded.config.data.validation_sets[""].path == "rows.csv"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.pth=x", "data.train.sources.a.pth (command line): unknown key; did you mean data.train.sources.a.path?"),
        ("b.split=test", "data.train.sources.b.split (command line): unknown key; it belongs to data.train.sources.b."),
        ("a.split=tst", "data.train.sources.a.split (command line): got tst; did you mean test? Known: train, test"),
        ("c={name: gsm9k}", "data.train.sources.c.name (command line): no c is named gsm9k; did you mean gsm8k?"),
        ("c={path: x}", "data.train.sources.c.name must be given: one of arithmetic, file"),
        ("c={name: file}", "data.train.sources.c.path must be given, e.g. data.train.sources.c.path=.../train.jsonl"),
        ("b.path=???", "data.train.sources.b.path must be given, e.g. data.train.sources.b.path="),
        ("c=3", "data.train.sources.c (command line): got 3, wanted a section with name: one of arithmetic"),
        ("c={name: mixture}", "data.train.sources.c.name (command line): no c is named mixture"),
    ],
)
def test_a_mistake_in_one_names_its_key(two: str, override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load(two, [f"data.train.sources.{override}"])
    assert len(caught.value.messages) == 1
    assert caught.value.messages[0].startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{}", "data.train.sources (command line): got {}, wanted a mapping of names to a section with name: one of"),
        ("[1]", "data.train.sources (command line): got [1], wanted a mapping of names to a section"),
        (
            "{'a.b': {name: gsm8k}}",
            "data.train.sources.a.b (command line): a.b is no name: use letters, digits, _ and -",
        ),
    ],
)
def test_a_mapping_that_is_none_is_refused(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load(BASE, [f"data.train={{name: mixture, sources: {override}}}"])
    assert caught.value.messages[0].startswith(message)
