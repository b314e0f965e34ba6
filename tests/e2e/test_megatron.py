"""The quickstart with actor and critic on Megatron-Core, on this CPU through tests/megatron_shim.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tandem.config.load import load
from tests.e2e.runs import run, short_config
from tests.e2e.test_quickstart import ACCURACY, END, START, learned
from tests.megatron_shim import INSTALLED, WANTED
from tests.train.ranks import on_ranks

pytestmark = pytest.mark.skipif(not INSTALLED, reason=WANTED)
MEGATRON = ("policy.backend.name=megatron", "value.backend.name=megatron")
FIVE = ("checkpointing.enabled=false", "data.validation=null", "ppo.max_num_steps=5")
EQUAL = 1e-4


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim, and no refusal of a machine without a GPU."""
    import tests.train.megatron_here  # noqa: F401

    monkeypatch.setattr("tandem.launch.trainers.check_device", lambda name, config: None)


def records_of(tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    return run(load("quickstart", [*FIVE, *overrides]).config, tmp_path).records


def assert_near(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """Every metric of every step, by name."""
    assert len(found) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=EQUAL, abs=EQUAL), f"step {step}: {name}"


@pytest.mark.usefixtures("on_cpu")
def test_its_first_five_steps_are_those_of_the_torch_backend(tmp_path: Path):
    assert_near(records_of(tmp_path / "megatron", *MEGATRON), records_of(tmp_path / "torch"))


def test_on_two_tensor_ranks_its_first_five_steps_are_those_of_the_torch_backend(tmp_path: Path):
    from tests.e2e.on_ranks import run_on_rank  # reads Megatron-Core

    sizes = [f"{model}.backend.tensor_model_parallel_size=2" for model in ("policy", "value")]
    ranks = ["cluster.launch=ray", "cluster.gpus_per_node=2", "data_plane={name: ray_actor}"]
    config = load("quickstart", [*FIVE, *MEGATRON, *sizes, *ranks]).config
    ours, other = on_ranks(2, run_on_rank, config, tmp_path, folder=tmp_path)
    assert ours.weights == other.weights
    assert_near(ours.records, records_of(tmp_path / "torch"))


@pytest.mark.usefixtures("on_cpu")
def test_it_learns_within_the_published_band(tmp_path: Path):
    rewards, before, after = learned(tmp_path, 1, *MEGATRON)
    assert START[0] <= rewards[0] <= START[1]
    assert statistics.fmean(rewards[-3:]) >= END
    assert before < 0.3
    assert after >= ACCURACY


def test_without_a_gpu_it_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match=r"value\.backend\.name=megatron computes on GPUs only, .*cluster\.device=cpu"):
        run(short_config("cluster.device=cpu", *MEGATRON), tmp_path)
