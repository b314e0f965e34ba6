"""Steps of real runs are computed again from their flight records, to the bit; a record that was changed is found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.check import to_yaml
from tandem.control.flight_recorder import folder, read_step, recorded
from tandem.launch.replay import replay, replay_step
from tandem.launch.run_dir import CONFIG, FLIGHT
from tandem.plane.files import FILE, read_rows
from tests.e2e.runs import run, short_config

RECORD = "logger.flight_recorder={}"


def flown(run_dir: Path, *overrides: str, recipe: str = "quickstart") -> list[dict[str, float]]:
    """A short run with a flight recorder."""
    config = short_config(RECORD, *overrides, recipe=recipe)
    (run_dir / CONFIG).write_text(to_yaml(config))
    return run(config, run_dir).records


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("quickstart", ()),
        ("quickstart_grpo", ()),
        ("quickstart", ("async_rl.sampler.max_lookahead_versions=1", "async_rl.weight_update=in_flight")),
        ("quickstart", ("ppo.ppo_epochs=2", "policy.train_global_batch_size=8", "ppo.policy_training_start_step=1")),
        ("quickstart", ("ppo.ppo_epochs=3", "ppo.target_kl=1.0e-7", "value_loss_fn={name: mse, cliprange: 0.2}")),
        (
            "quickstart",
            (
                "async_rl.min_groups_for_streaming_train=2",
                "policy.train_global_batch_size=8",
                "value_loss_fn={name: hl_gauss}",
            ),
        ),
        (
            "quickstart",
            (
                "loss_fn.reference_policy_kl_penalty=0.05",
                "reference={}",
                "loss_fn.adaptive_kl={target: 0.01, horizon: 100}",
                "loss_fn.entropy_bonus=0.01",
                "policy.sequence_packing.train_mb_tokens=128",
            ),
        ),
    ],
)
def test_every_step_is_computed_again_to_the_bit(tmp_path: Path, recipe: str, overrides: Sequence[str]):
    records = flown(tmp_path, *overrides, recipe=recipe)
    for step in (1, 2, 3):
        found = replay_step(tmp_path, step)
        assert {"advantages", "weights"} <= {one.name for one in found.columns}
        assert found.wrong(0.0) == []
        learned = {name for name in records[step - 1] if name.endswith("/loss")}
        assert learned <= {one.name for one in found.metrics}
        kept = found.record.metrics
        assert {name: kept[name] for name in learned} == {name: records[step - 1][name] for name in learned}


@pytest.mark.usefixtures("ray_here")
@pytest.mark.timeout(280)
def test_a_step_of_two_ranks_and_two_engines_under_ray_is_computed_again(tmp_path: Path):
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    ranks = ("cluster.launch=ray", "cluster.device=cpu", "cluster.num_threads=1", "cluster.gpus_per_node=4")
    flown(tmp_path, *ranks, apart, "ppo.max_num_steps=2", "policy.train_global_batch_size=8")
    for step in (1, 2):
        assert replay_step(tmp_path, step).wrong(1e-6) == []
    columns = read_rows(folder(tmp_path / FLIGHT, 2))
    assert {int(number) for number in columns["engine"][1]} == {0, 1}
    assert len({int(number) for number in columns["epoch_0/actor/micro_batch"][1]}) == 2, "one micro-batch a rank"


def test_every_token_can_be_traced(tmp_path: Path):
    flown(tmp_path, "async_rl.sampler.max_lookahead_versions=1")
    place = folder(tmp_path / FLIGHT, 3)
    said, rows = read_step(place), read_rows(place)
    columns = {name: dict(zip(keys, tensors, strict=True)) for name, (keys, tensors) in rows.items()}
    assert said.version == 2
    assert len({group.prompt_id for group in said.groups}) == 4
    for group in said.groups:
        for key, length in zip(group.keys, group.lengths, strict=True):
            mask = columns["mask"][key]
            assert len(mask) == length
            assert set(columns["versions"][key][mask].tolist()) == {1}, "one version ahead"
            assert int(columns["attempt"][key]) == int(columns["engine"][key]) == 0
            assert int(columns["epoch_0/actor/mini_batch"][key]) in (0, 1)
            for name in ("reward", "truncated", "epoch_0/actor/micro_batch", "epoch_0/critic/micro_batch"):
                assert columns[name][key].dim() == 0
            ratio = columns["epoch_0/actor/ratio"][key]
            expected = (columns["epoch_0/actor/logprobs"][key] - columns["old_logprobs"][key]).exp()
            assert torch.equal(ratio[mask], expected[mask])
            outside = (ratio < 0.8) & (columns["advantages"][key] < 0) | (ratio > 1.2) & (
                columns["advantages"][key] > 0
            )
            assert torch.equal(columns["epoch_0/actor/clip"][key][mask] == 1, outside[mask])


@pytest.mark.parametrize("column", ["advantages", "epoch_0/actor/logprobs", "values", "reward", "epoch_0/actor/clip"])
def test_a_record_that_was_changed_does_not_match(tmp_path: Path, column: str, capsys: pytest.CaptureFixture[str]):
    flown(tmp_path, "ppo.max_num_steps=1")
    assert replay(str(tmp_path), 1, tolerance=1e-5) == 0
    assert "step 1 matches" in capsys.readouterr().out
    file = recorded(tmp_path / FLIGHT)[0] / FILE
    cells = load_file(file)
    name = next(name for name in sorted(cells) if name.endswith(f"/{column}"))
    key = name.split("/", 1)[0]
    mask = cells[f"{key}/mask"]
    cells[name] = cells[name] + 1 if cells[name].dim() == 0 else torch.where(mask, cells[name] + 1, cells[name])
    save_file(cells, file)
    assert replay(str(tmp_path), 1, tolerance=1e-5) == 1
    assert "does not match in" in capsys.readouterr().out


def test_a_step_that_was_not_recorded_names_those_that_were(tmp_path: Path):
    flown(tmp_path, "ppo.max_num_steps=1")
    with pytest.raises(ValueError, match="no flight record of step 9; there are 1"):
        replay_step(tmp_path, 9)


def test_a_recorder_changes_no_bit_of_the_run(tmp_path: Path):
    plain = run(short_config(), tmp_path / "without")
    kept = run(short_config(RECORD), tmp_path / "with")
    assert kept.weights == plain.weights
    moved = ("plane/",)
    for ours, theirs in zip(kept.records, plain.records, strict=True):
        assert {n: v for n, v in ours.items() if not n.startswith(moved)} == {
            n: v for n, v in theirs.items() if not n.startswith(moved)
        }
