"""A run goes on from its checkpoint on other ranks and in the other backend: weights and moments are cut anew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tandem.config.check import to_yaml
from tandem.train.files import MOMENTS, WEIGHTS, SavedTensors
from tests.e2e.runs import Ran, assert_near, run, short_config
from tests.megatron_shim import INSTALLED, WANTED
from tests.train.ranks import on_ranks
from tests.train.test_torch_ranks import distance

pytestmark = pytest.mark.skipif(not INSTALLED, reason=WANTED)
MODELS = ("policy", "value")
MEGATRON = tuple(f"{model}.backend.name=megatron" for model in MODELS)
# tandem refuses sizes that one process does not have: what says that there are two is true of these ranks.
TWO_RANKS = ("cluster.launch=ray", "cluster.gpus_per_node=2", "data_plane={name: ray_actor}")
TENSOR = tuple(f"{model}.backend.tensor_model_parallel_size=2" for model in MODELS)
LAYOUTS = {"torch": (), "one rank": MEGATRON, "two tensor ranks": (*MEGATRON, *TENSOR, *TWO_RANKS)}
UNDER_RAY = ("cluster.launch=ray", "cluster.device=cpu", "cluster.num_threads=1")
BEGUN, WHOLE = 2, 4
NEAR = 1e-4


def steps(layout: str, until: int, folder: Path, *, resume: bool) -> Ran:
    """What the run, or its first rank, saw. The checkpoints are in run-0."""
    config = short_config(f"ppo.max_num_steps={until}", "seed=7", *LAYOUTS[layout])
    if "ranks" not in layout:
        return run(config, folder / "run-0", resume=resume)
    from tests.e2e.on_ranks import run_on_rank  # reads Megatron-Core

    return on_ranks(2, run_on_rank, config, folder, resume, folder=folder / "ranks")[0]


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    """The shim, and no refusal of a machine without a GPU."""
    import tests.train.megatron_here  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.launch.trainers.check_device", lambda name, config: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """The run that was never stopped, in the torch backend."""
    folder = tmp_path_factory.mktemp("whole")
    return steps("torch", WHOLE, folder, resume=False), folder


@pytest.fixture(scope="module", params=LAYOUTS)
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first steps under one layout."""
    folder = tmp_path_factory.mktemp("begun")
    steps(request.param, BEGUN, folder, resume=False)
    return folder


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Of both models, what the newest checkpoint holds."""
    found = {}
    for model in ("actor", "critic"):
        for stem in (WEIGHTS, MOMENTS):
            files = SavedTensors(folder / "run-0" / "checkpoints" / f"step_{WHOLE:06d}" / model, stem)
            found[f"{model}/{stem}"] = {name: files.read(name) for name in files.names()}
    return found


@pytest.mark.parametrize("then", LAYOUTS)
def test_the_next_steps_are_those_of_a_run_that_went_on(
    begun: Path, then: str, whole: tuple[Ran, Path], tmp_path: Path
):
    for rank in range(2):
        shutil.copytree(begun / "run-0" / "checkpoints", tmp_path / f"run-{rank}" / "checkpoints")
    continued = steps(then, WHOLE, tmp_path, resume=True)
    assert_near(continued, Ran(whole[0].records[BEGUN:], {}), NEAR)
    assert_same_files(tmp_path, whole[1])


def assert_same_files(folder: Path, wanted: Path) -> None:
    found = saved(folder)
    for part, tensors in saved(wanted).items():
        assert distance(found[part], tensors) < NEAR, part


def train_under_ray(run_dir: Path, until: int, *layout: str) -> list[dict[str, float]]:
    """`tandem train` from the command line, its trainers in processes that Ray places. All steps so far."""
    pytest.importorskip("ray", reason="needs the extra ray")
    here = Path(__file__)
    paths = (here.parent / "megatron_on_cpu", here.parents[2])
    config = short_config(f"ppo.max_num_steps={until}", "seed=7", *UNDER_RAY, *layout)
    recipe = run_dir.with_suffix(".yaml")
    recipe.write_text(to_yaml(config))
    subprocess.run(
        [sys.executable, "-m", "tandem", "train", str(recipe), f"run_dir={run_dir}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=True,
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("one_first", [True, False], ids=["one-then-two", "two-then-one"])
def test_so_it_is_under_ray(one_first: bool, whole: tuple[Ran, Path], tmp_path: Path):
    one, two = MEGATRON, (*MEGATRON, *TENSOR, "cluster.gpus_per_node=2")
    first, then = (one, two) if one_first else (two, one)
    train_under_ray(tmp_path / "run-0", BEGUN, *first)
    rows = train_under_ray(tmp_path / "run-0", WHOLE, *then)
    records = [{name: row[name] for name in wanted} for row, wanted in zip(rows, whole[0].records, strict=True)]
    assert_near(Ran(records, {}), whole[0], NEAR)
    assert_same_files(tmp_path, whole[1])


def test_a_critic_of_the_torch_backend_starts_one_of_megatron_core(whole: tuple[Ran, Path], tmp_path: Path):
    critic = next((whole[1] / "run-0" / "checkpoints").glob("step_*/critic"))
    found = [
        run(short_config(f"value.warm_start={critic}", "ppo.max_num_steps=1", *layout), tmp_path / str(number))
        for number, layout in enumerate(((), MEGATRON))
    ]
    first = found[0].records[0]
    assert first["critic/value_min"] < first["critic/value_max"], "a new critic says 0 of everything"
    assert_near(found[1], found[0], NEAR)
