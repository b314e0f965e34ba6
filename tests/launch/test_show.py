"""`tandem show`: tells what is there, whole or not, in 80 columns; never fails on what a kill left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.config.check import to_yaml
from tandem.launch.show import show, size
from tests.e2e.runs import run, short_config

CHANGES = (
    "ppo.max_num_steps=2",
    "ppo.val_period=1",
    "data.validation={name: arithmetic, split: validation, size: 4}",
    "policy.optimizer.lr=1e-4",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, both validated, ranked and saved, with the files that `tandem train` writes beside them."""
    run_dir = tmp_path_factory.mktemp("show") / "run"
    run_dir.mkdir()
    config = short_config(*CHANGES)
    run(config, run_dir)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 0, "val/accuracy": 0.25}\n'
        '{"step": 1, "rollout/reward": 0.5, "val/accuracy": 0.75}\n'
        '{"step": 2, "rollout/reward": 0.625, "val/accuracy": null}\n'
        '{"step": 2, "val/accuracy": 0.5}\n'
        '{"step": 3, "rollout/rew'  # cut off by a kill
    )
    (run_dir / "untrained.jsonl").write_text(
        '{"index": 4, "id": "a", "why": "no_signal", "cause": ""}\n'
        '{"index": 7, "id": "b", "why": "data_failure", "cause": "KeyError: [bold]x"}\n'
        '{"index": 4, "id": "a", "why": "no_signal", "cause": ""}\n'  # once more after a resume
        '{"index": 9, "id": "c", "why": "no_signal", "cause": ""}\n'
    )
    return run_dir


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What is printed about a place, at 80 columns, with runs of spaces and borders as one space."""
    monkeypatch.setenv("COLUMNS", "80")

    def tell(place: Path) -> str:
        show(str(place))
        printed = capsys.readouterr().out
        commands = ("go on", "evaluate", "export", "branch", "its critic", "look closer", "begin")
        tables = [line for line in printed.splitlines() if not line.strip().startswith((*commands, str(place)))]
        assert all(len(line) <= 80 for line in tables)
        return " ".join(printed.replace("│", " ").split())

    return tell


def test_a_finished_run_tells_its_story(trained: Path, told):
    text = told(trained)
    assert "quickstart: ppo, gae, from model quickstart" in text
    assert "steps 2 of 2" in text
    assert "0.250 (step 0) -> best 0.750 (step 1) -> latest 0.500 (step 2)" in text
    assert "reward 0.500 (step 1) -> 0.625 (step 2)" in text
    assert "3 prompts: 2 no_signal, 1 data_failure" in text
    best = (trained / "checkpoints" / "best").read_text().strip()
    assert text.count("sound") == 2
    assert ("latest, best sound" in text) == (best == "step_000002")
    assert "untrained.jsonl" in text
    assert f"tandem train {trained} ppo.max_num_steps=4" in text
    assert f"tandem eval {trained}" in text
    assert f"tandem export {trained} OUT" in text


def test_damage_is_named_and_the_rest_is_told(trained: Path, told, tmp_path: Path):
    run_dir = tmp_path / "r"
    shutil.copytree(trained, run_dir)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step_000002" / "critic" / "model.safetensors").write_bytes(b"torn")
    shutil.copytree(checkpoints / "step_000001", checkpoints / "step_000003")
    (checkpoints / "step_000003" / "COMPLETE").unlink()
    (checkpoints / "step_000004.partial").mkdir()
    (checkpoints / "latest").unlink()
    (run_dir / "config.yaml").write_text("ppo: [1, 2\n")
    text = told(run_dir)
    assert "recipe unknown: config.yaml cannot be read" in text
    assert "steps 2 accuracy" in text
    assert "damaged: critic/model.safetensors is torn: 4 bytes of" in text
    assert "not whole, without COMPLETE: it does not count" in text
    assert "half-written" in text
    assert f"tandem eval {checkpoints / 'step_000001'}" in text


def test_a_checkpoint_tells_what_it_is_good_for(trained: Path, told, tmp_path: Path):
    checkpoint = trained / "checkpoints" / "step_000001"
    text = told(checkpoint)
    assert "quickstart: ppo" in text
    assert "(val:accuracy)" in text
    assert "state sound" in text
    assert "actor/" in text
    assert f"checkpointing.resume={checkpoint} run_dir=NEW" in text
    assert f"value.warm_start={checkpoint}/critic" in text
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "state.json").write_text("{}")
    text = told(copy)
    assert "damaged: state.json is torn" in text
    assert "tandem export" not in text


def test_an_empty_directory_and_one_that_is_no_run(tmp_path: Path, told):
    run_dir = tmp_path / "a [red]run"  # neither markup nor one word for a shell
    run_dir.mkdir()
    text = told(run_dir)
    assert "no run has begun here yet" in text
    assert f"run_dir='{run_dir}'" in text
    with pytest.raises(ValueError, match="neither a run directory"):
        show(str(tmp_path))
    with pytest.raises(ValueError, match="no directory"):
        show(str(tmp_path / "nothing"))


def test_a_run_that_has_not_saved_yet(trained: Path, told, tmp_path: Path):
    (tmp_path / "r").mkdir()
    for name in ("config.yaml", "lock"):
        (tmp_path / "r" / name).write_text((trained / "config.yaml").read_text() if name == "config.yaml" else "")
    text = told(tmp_path / "r")
    assert "steps 0 of 2" in text
    assert "untrained 0 prompts" in text
    assert "tandem export" not in text


def test_sizes_are_read_at_a_glance():
    assert [size(count) for count in (0, 17, 999, 1000, 3_350_936, 4e13)] == [
        *("0 B", "17 B", "999 B", "1.0 kB", "3.4 MB", "40.0 TB")
    ]
