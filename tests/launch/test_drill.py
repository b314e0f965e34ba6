"""What a drill reads from a run directory, which promise it finds broken, and how it makes a recipe small."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config.load import load
from tandem.control import vault
from tandem.control.flight_recorder import FORMAT, RecordedGroup, StepRecord
from tandem.launch.drill.drill import SMALL, drill, has_bits, prepare, sizes
from tandem.launch.drill.evidence import Ended, accounts_of, judge
from tandem.launch.drill.faults import FAULTS, NOTE

CONFIG = load("quickstart", ["ppo.max_num_steps=2"]).config
WEIGHTS = {"actor/model.safetensors": b"actor", "critic/model.safetensors": b"critic"}


def write_run(
    run_dir: Path,
    *,
    steps: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    begun: int = 4,
    named: dict[int, str] | None = None,
    held: tuple[int, ...] = (),
    reward: float = 0.5,
    weights: dict[str, bytes] = WEIGHTS,
) -> Ended:
    """A run directory as a run leaves it: flight records, metrics, untrained.jsonl, one checkpoint, and a fault."""
    for number, indices in enumerate(steps, start=1):
        place = run_dir / "flight" / f"step_{number:06d}"
        place.mkdir(parents=True)
        groups = tuple(RecordedGroup(i, f"id-{i}", (i,), (5,), 0) for i in indices)
        (place / "step.json").write_text(json.dumps(asdict(StepRecord(FORMAT, number, 0, True, (), {}, groups, {}))))
    records = [{"step": n, "rollout/reward": reward, "time/step_s": n * reward} for n in range(1, len(steps) + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    untrained = [{"index": i, "id": f"id-{i}", "why": why, "cause": ""} for i, why in (named or {}).items()]
    (run_dir / "untrained.jsonl").write_text("".join(json.dumps(record) + "\n" for record in untrained))
    (run_dir / NOTE).write_text('{"says": "it happened"}\n')
    partial = vault.begin(run_dir / "checkpoints", len(steps))
    buffer = [{"index": index} for index in held]
    state = {"controller": {"producer": {"next_index": begun}, "buffer": buffer}}
    (partial / "state.json").write_text(json.dumps(state))
    for name, content in weights.items():
        (partial / name).parent.mkdir(exist_ok=True)
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
        (partial / name).write_bytes(len(header).to_bytes(8, "little") + header + content)
    vault.commit(partial, score=None)
    return Ended(run_dir, 0, len(steps))


def test_every_prompt_is_found_where_it_is(tmp_path: Path):
    write_run(tmp_path, begun=7, named={4: "no_signal"}, held=(5, 6))
    accounts = accounts_of(tmp_path)
    assert accounts.trained == Counter([0, 1, 2, 3])
    assert (set(accounts.named), accounts.held) == ({4}, {5, 6})
    assert (accounts.lost, accounts.twice) == ([], [])


@pytest.mark.parametrize(
    ("left", "lost", "twice"),
    [
        ({"begun": 5}, [4], []),
        ({"steps": ((0, 1), (1, 2)), "begun": 3}, [], [1]),
        ({"named": {2: "stale"}}, [], [2]),
        ({"held": (3,)}, [], [3]),
    ],
)
def test_what_is_lost_or_trained_twice_is_named(tmp_path: Path, left: dict, lost: list[int], twice: list[int]):
    ended = write_run(tmp_path, **left)
    accounts = accounts_of(tmp_path)
    assert (accounts.lost, accounts.twice) == (lost, twice)
    assert len(judge("straggler", FAULTS["straggler"], ended, CONFIG, None).broken) == 1


def test_a_run_that_kept_all_promises_is_well(tmp_path: Path):
    whole, ended = write_run(tmp_path / "whole"), write_run(tmp_path / "run")
    verdict = judge("straggler", FAULTS["straggler"], ended, CONFIG, whole)
    assert (verdict.broken, verdict.bits, verdict.happened) == ((), "the same", "it happened")
    assert verdict.prompts == "4 begun, 4 trained, 0 lost"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"weights": WEIGHTS | {"actor/model.safetensors": b"other"}}, "other weights .*: actor/model.safetensors"),
        ({"reward": 0.25}, "step 1: another rollout/reward than without the fault"),
    ],
)
def test_other_bits_than_without_the_fault_are_named(tmp_path: Path, other: dict, said: str):
    whole, ended = write_run(tmp_path / "whole"), write_run(tmp_path / "run", **other)
    verdict = judge("straggler", FAULTS["straggler"], ended, CONFIG, whole)
    assert verdict.bits == "others"
    (first, *_) = verdict.broken
    assert re.search(said, first)
    assert "time/step_s" not in " ".join(verdict.broken)


def test_a_failure_that_had_passed_costs_no_prompt_and_an_error_of_the_scorer_one(tmp_path: Path):
    ended = write_run(tmp_path, begun=5, named={4: "infrastructure_failure"})
    (said,) = judge("hung_scorer", FAULTS["hung_scorer"], ended, CONFIG, None).broken
    assert said == "prompt 'id-4' (infrastructure_failure): given up for a fault that had passed"
    assert judge("scorer_error", FAULTS["scorer_error"], ended, CONFIG, None).broken == ()


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"code": 2, "said": "error: so"}, "it ended with code 2, not code 1: error: so"),
        ({"code": None}, "it ended with no end within its time, not code 1: "),
        ({"code": 1, "code_of_next": 1}, "it could not be gone on with: code 1: "),
        ({"code": 1, "step": 0}, "no whole checkpoint was left"),
    ],
)
def test_how_a_run_ended_is_held_against_how_it_may_end(tmp_path: Path, ended: dict, said: str):
    write_run(tmp_path)
    found = judge("full_disk", FAULTS["full_disk"], Ended(**({"run_dir": tmp_path, "step": 1} | ended)), CONFIG, None)
    assert said in found.broken


def test_a_fault_that_did_not_happen_is_no_drill(tmp_path: Path):
    ended = write_run(tmp_path)
    (tmp_path / NOTE).unlink()
    assert judge("straggler", FAULTS["straggler"], ended, CONFIG, None).broken == ("the fault did not happen",)


@pytest.mark.parametrize(
    ("recipe", "changes", "steps"),
    [
        ("quickstart", (), 3),
        ("quickstart_grpo", (), 3),
        ("quickstart_async", (), 4),
        ("quickstart_async", ("async_rl.sampler.max_lookahead_versions=4",), 7),
        ("quickstart", ("async_rl.sampler={name: windowed, buffer_capacity_groups: 34}",), 11),
        ("ppo_qwen2.5_1.5b_gsm8k_2x8_async", (), 5),
    ],
)
def test_a_recipe_has_a_small_form(recipe: str, changes: tuple[str, ...], steps: int):
    small = load(recipe, (*SMALL, *sizes(load(recipe, changes).config), *changes)).config
    assert (small.algorithm.max_num_steps, small.algorithm.samples_per_step) == (steps, 8)


def test_bits_are_compared_where_they_are_promised():
    on_cpu = "cluster.device=cpu"
    assert has_bits(load("quickstart", [on_cpu]).config)
    assert not has_bits(load("quickstart_async", [on_cpu]).config)
    assert not has_bits(load("quickstart", [on_cpu, "policy.precision=bfloat16"]).config)
    assert not has_bits(load("quickstart", ["cluster.device=cuda"]).config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ppo.max_num_steps=1", "1 steps are too few for a drill of quickstart: take 2 or more"),
        ("logger.flight_recorder=null", "take logger.flight_recorder back"),
        ("run_dir={full}", "is not empty"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, change: str, said: str):
    (tmp_path / "file").touch()
    changes = [f"run_dir={tmp_path / 'new'}", change.format(full=tmp_path)]
    with pytest.raises(ValueError, match=said):
        prepare("quickstart", changes, 60.0)


def test_with_a_lead_there_must_be_requests_left_when_the_first_checkpoint_is_whole(tmp_path: Path):
    changes = [f"run_dir={tmp_path / 'new'}", "async_rl.sampler.max_lookahead_versions=3", "ppo.max_num_steps=4"]
    with pytest.raises(ValueError, match=r"take 5 or more; .* the prompts of 4 may have been begun"):
        prepare("quickstart_async", changes, 60.0)


def test_a_ray_of_others_is_not_killed(tmp_path: Path):
    changes = [f"run_dir={tmp_path / 'new'}", "cluster.launch=ray", "cluster.ray.address=auto", "cluster.device=cpu"]
    with pytest.raises(ValueError, match="a drill kills processes of its own Ray only"):
        prepare("quickstart", changes, 60.0)


def test_an_unknown_fault_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no fault 'flood': give one of straggler, dead_engine"):
        drill("quickstart", [], only=["flood"], limit_s=60.0, console=Console(file=StringIO()))
