"""Checkpoints on disk: whole or not there, as they were written or refused with the file's name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.control import vault


def write(directory: Path, step: int, score: float | None = None) -> Path:
    folder = vault.begin(directory, step)
    (folder / "actor").mkdir()
    save_file({"weight": torch.full((2, step), 0.5)}, folder / "actor" / "model.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    return vault.commit(folder, score=score)


def test_a_committed_checkpoint_is_verified_and_the_newest(tmp_path: Path):
    write(tmp_path, 1)
    second = write(tmp_path, 2)
    assert vault.newest_verified(tmp_path) == second
    assert (tmp_path / "latest").read_text() == "step_000002\n"
    manifest = vault.verified(second)
    assert (manifest.step, sorted(manifest.files)) == (2, ["actor/model.safetensors", "state.json"])
    assert manifest.files["actor/model.safetensors"].tensors == {"weight": "F32[2, 2]"}


def test_what_was_not_written_to_its_end_does_not_count(tmp_path: Path):
    first = write(tmp_path, 1)
    (write(tmp_path, 2) / vault.MARKER).unlink()
    vault.begin(tmp_path, 3)
    assert vault.newest_verified(tmp_path) == first


DAMAGE = {
    "torn": (lambda c: (c / "actor/model.safetensors").write_bytes(b"short"), "model.safetensors is torn"),
    "changed": (lambda c: (c / "state.json").write_text('{"step": 3}'), "state.json is torn"),
    "missing": (lambda c: (c / "actor/model.safetensors").unlink(), "model.safetensors is missing"),
    "manifest": (lambda c: (c / "manifest.json").write_text("{}"), "manifest.json is not what was written"),
    "planted": (lambda c: (c / "actor/optimizer.pt").write_bytes(b"x"), "optimizer.pt is not in the manifest"),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str):
    damage, said = DAMAGE[kind]
    sound, damaged = write(tmp_path, 1), write(tmp_path, 2)
    damage(damaged)
    with pytest.raises(ValueError, match=said):
        vault.verified(damaged)
    assert vault.newest_verified(tmp_path) == sound
    assert "step_000002 is passed over" in caplog.text


def test_if_no_checkpoint_is_sound_the_run_does_not_start_anew_in_silence(tmp_path: Path):
    (write(tmp_path, 1) / "state.json").unlink()
    with pytest.raises(ValueError, match="none of the 1 checkpoints"):
        vault.newest_verified(tmp_path)
    assert vault.newest_verified(tmp_path / "empty") is None


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["actor/optimizer.pt", "actor/model.safetensors", "state.json"])
def test_a_planted_pickle_is_refused_and_never_runs(tmp_path: Path, name: str):
    checkpoint = write(tmp_path / "checkpoints", 1)
    (checkpoint / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ValueError, match=name.split("/")[-1]):
        vault.verified(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("last", "best", "higher", "kept", "named"),
    [
        (1, 0, True, [5], 3),
        (2, 0, True, [4, 5], 3),
        (1, 1, True, [3, 5], 3),
        (1, 2, True, [2, 3, 5], 3),
        (1, 1, False, [4, 5], 4),
        (9, 9, True, [1, 2, 3, 4, 5], 3),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, last: int, best: int, higher: bool, kept: list[int], named: int
):
    for step, score in enumerate([None, 0.5, 0.9, 0.1, None], start=1):  # 1 is warm-up, 5 has no validation
        write(tmp_path, step, score)
    vault.begin(tmp_path, 7)
    vault.prune(tmp_path, keep_last_n=last, keep_top_k=best, higher_is_better=higher)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [f"step_{step:06d}" for step in kept]
    assert (tmp_path / "best").read_text() == f"step_{named:06d}\n"
