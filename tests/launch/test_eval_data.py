"""`--data`: names of public sets, files, local copies, and several of them as named sets."""

from pathlib import Path

import pytest

from tandem.config.data import Gsm8kData, Preset, Source
from tandem.config.load import load
from tandem.config.schema import names_of
from tandem.launch.eval_data import PUBLIC, data_override


def loaded(*given: str) -> dict[str, Source]:
    base = str(Path(__file__).parents[1] / "config" / "base.yaml")
    return load(base, [data_override(given)], forget="data.validation").config.data.validation_sets


@pytest.mark.parametrize("name", [*PUBLIC, "arithmetic"])
def test_a_name_is_that_set_on_its_held_out_split(name: str):
    (source,) = loaded(name).values()
    assert source.name == name
    if name in ("gsm8k", "arithmetic"):
        assert source.split == {"gsm8k": "test", "arithmetic": "validation"}[name]


def test_every_public_set_has_its_name_here():
    assert set(PUBLIC) == {name for preset in Preset.__subclasses__() for name in names_of(preset)}


@pytest.mark.parametrize("name", ["rows.jsonl", "my rows, of: {2024} #1.jsonl", 'a "quoted" name.csv'])
def test_a_file_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    (source,) = loaded(name).values()
    assert (source.name, source.path) == ("file", name)


def test_a_local_copy_of_a_public_set(tmp_path: Path):
    (source,) = loaded(f"gsm8k:{tmp_path}/test.jsonl").values()
    assert source == Gsm8kData(name="gsm8k", path=f"{tmp_path}/test.jsonl")


def test_several_are_named_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.rows.jsonl").touch()
    sets = loaded("aime_2024", "a/my.rows.jsonl", "b/my.rows.jsonl")
    assert {name: source.name for name, source in sets.items()} == {
        "aime_2024": "aime_2024",
        "my-rows": "file",
        "my-rows-2": "file",
    }


def test_what_is_neither_is_refused_with_the_names_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--data gsm9k: there is no such file or folder.*\(gsm8k, dapo_math_17k"):
        data_override(["gsm9k"])
