"""Reading a NeMo-RL config: inheritance and sums as its trainer does, and nothing of the file is run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.nemo_rl.importing import import_config
from tandem.config.nemo_rl.recipe import to_yaml
from tandem.config.nemo_rl.source import read

POLICY = "policy: {model_name: m, train_global_batch_size: 4, max_total_sequence_length: 64}"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_inherit_from_where_they_lie(tmp_path: Path):
    write(tmp_path, "base/a.yaml", "grpo: {max_num_steps: 1, val_period: 1, seed: 1}\n")
    write(tmp_path, "base/b.yaml", "defaults: a.yaml\ngrpo: {val_period: 2, seed: 2}\n")
    write(tmp_path, "c.yaml", "grpo: {seed: 3}\n")
    path = write(tmp_path, "run/d.yaml", "defaults: [../base/b.yaml, ../c.yaml]\ngrpo: {ppo_epochs: 4}\n")
    source = read(path)
    assert source.values["grpo"] == {"max_num_steps": 1, "val_period": 2, "seed": 3, "ppo_epochs": 4}
    assert {leaf.key: leaf.origin.place for leaf in source.leaves}["grpo.val_period"].endswith("b.yaml")


def test_a_section_that_overrides_forgets_what_it_inherits(tmp_path: Path):
    write(tmp_path, "a.yaml", "grpo: {seed: 1}\ndata: {train: {split: x}, shuffle: true}\n")
    path = write(tmp_path, "b.yaml", "defaults: a.yaml\ndata: {_override_: true, train: {dataset_name: y}}\n")
    assert read(path).values["data"] == {"_override_": True, "train": {"dataset_name": "y"}}


def test_sums_and_references_are_resolved_over_the_merged_file(tmp_path: Path):
    write(tmp_path, "a.yaml", "grpo: {seed: 2}\nx: {size: 3, twice: '${mul:${.size}, 2}', list: ['${x.size}']}\n")
    path = write(tmp_path, "b.yaml", "defaults: a.yaml\nx: {size: 5, most: '${max:${x.twice},${div:9,3}}'}\n")
    assert read(path).values["x"] == {"size": 5, "twice": 10, "list": [5], "most": 10}


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:TANDEM_SECRET}",
        "a${ oc.env:TANDEM_SECRET}b",
        "${${x.resolver}:TANDEM_SECRET}",
        "${mul:2,${oc.decode:${oc.env:TANDEM_SECRET}}}",
        "${oc.select:grpo}",
        "${python:1+1}",
    ],
)
def test_nothing_but_keys_and_sums_is_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_SECRET", "4242")
    path = write(
        tmp_path,
        "a.yaml",
        f"grpo: {{seed: '{text}', max_num_steps: '${{grpo.seed}}'}}\nx: {{resolver: oc.env}}\n{POLICY}\n",
    )
    imported = import_config(path)
    rows = {row.key: row for row in imported.rows}
    assert rows["grpo.seed"].fate == "not supported"
    assert "write the value" in rows["grpo.seed"].text
    assert rows["grpo.max_num_steps"].fate == "not supported"
    assert "4242" not in to_yaml(imported.recipe, "") + "".join(row.text + str(row.value) for row in imported.rows)


def test_text_that_looks_like_code_stays_text(tmp_path: Path):
    path = write(tmp_path, "a.yaml", f"grpo: {{seed: 1}}\nlogger: {{log_dir: '__import__(\"os\")'}}\n{POLICY}\n")
    assert read(path).get("logger.log_dir") == '__import__("os")'


def test_a_tag_that_makes_objects_is_refused(tmp_path: Path):
    path = write(tmp_path, "a.yaml", "grpo: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        read(path)


def test_aliases_that_stand_for_billions_of_values_are_refused_at_once(tmp_path: Path):
    lines = [f"{b}: &{b} [{', '.join([f'*{a}'] * 20)}]\n" for a, b in pairwise("abcdefghij")]
    with pytest.raises(ConfigError, match="expansion exceeds"):
        read(write(tmp_path, "a.yaml", "grpo: {seed: 1}\na: &a [1, 2, 3]\n" + "".join(lines)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: b.yaml\ngrpo: {}\n", "a.yaml:1.: there is no file .*b.yaml"),
        ("defaults: a.yaml\ngrpo: {}\n", "circle"),
        ("defaults: {a: b}\ngrpo: {}\n", "wanted the path of a file"),
        ("sft: {max_num_steps: 1}\npolicy: {}\n", "neither a section ppo nor grpo .sections: sft, policy"),
        ("grpo: {seed: 1}\nppo: {seed: 1}\n", "both a section ppo and a section grpo"),
        ("grpo: {seed: 1\n", "not readable as YAML"),
        ("- grpo\n", "is a mapping of keys"),
    ],
)
def test_what_is_no_such_config_is_refused(text: str, says: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=says):
        read(write(tmp_path, "a.yaml", text))


def test_a_key_that_cannot_be_resolved_is_a_row(tmp_path: Path):
    path = write(tmp_path, "a.yaml", f"grpo: {{seed: '${{no.such}}', val_period: '${{mul:a,2}}'}}\n{POLICY}\n")
    rows = {row.key: row.text for row in import_config(path).rows}
    assert "'no.such' not found" in rows["grpo.seed"]
    assert "mul takes two numbers" in rows["grpo.val_period"]
