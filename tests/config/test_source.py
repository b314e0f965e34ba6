"""Files that cannot be read, and overrides that are none: one error each, with its place."""

from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.source import read_file, read_overrides


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (b"name: a\nppo:\n\tmax_num_steps: 3\n", ":3", "tab"),
        (b"name: a\nppo: {x: [1\n", ":3", "not readable as YAML"),
        (b"name: a\nrun_dir: caf\xe9\n", ":2", "0xe9 is not UTF-8"),
        (b"name: a\nrun_dir: \x07\n", ":2", "not readable as YAML"),
        (b"name: a\nseed: 1\nname: b\n", ":3", "'name' is given twice, first in line 1"),
        (b"name: a\nppo:\n  run_dir: ${x\n", ":3", "ppo.run_dir"),
        (b"data: {path: ???}\n", ":1", "'???' in quotes"),
        (b"a: &a {b: *a}\n", ":1", "recursive"),
        (b"a: !!python/object:os.system x\n", ":1", "tag"),
        (b"a: 1\n---\nb: 2\n", ":2", "another document"),
        (b"1: x\n", ":1", "not text"),
        (b"- a\n", ":1", "mapping of keys"),
        (b"# nothing\n", "", "is empty"),
    ],
)
def test_an_unreadable_recipe_is_one_error_with_its_line(tmp_path: Path, content: bytes, place: str, reason: str):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    (message,) = caught.value.messages
    assert f"bad.yaml{place}" in message
    assert reason in message


def test_every_duplicate_key_is_reported(tmp_path: Path):
    path = tmp_path / "twice.yaml"
    path.write_text("ppo:\n  a: 1\n  b: {c: 1, c: 2}\n  a: 2\n")
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert [message.partition("twice.yaml")[2][:3] for message in caught.value.messages] == [":3:", ":4:"]


def test_a_byte_order_mark_and_merge_keys_are_read(tmp_path: Path):
    path = tmp_path / "fine.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\n")
    tree = read_file(path)
    assert tree.plain() == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}
    assert {".".join(key): node.origin.line for key, node in tree.walk()}["b.y"] == 6


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("ppo.max_num_steps", "wanted key=value"),
        ("ppo..x=1", "wanted key=value"),
        ("=1", "wanted key=value"),
        ("+seed=1", "no sign before a key; write seed=VALUE"),
        ("~value=1", "value=null"),
        ("run_dir=", "run_dir=null"),
        ("run_dir=[1", "not readable as YAML"),
        ("run_dir=${", "run_dir"),
        ("data.system_prompt=end with #### N", "comment"),
        ("ppo={1: 2}", "not text"),
        ("defaults=quickstart", "only a recipe file inherits"),
    ],
)
def test_an_override_that_is_none_is_refused(override: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        read_overrides([override])
    (message,) = caught.value.messages
    assert reason in message


def test_wrong_overrides_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load("quickstart", ["a", "+b=1", "c="])
    assert len(caught.value.messages) == 3
