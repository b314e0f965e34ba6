"""kill -9 at any moment, also inside every write: started again, the run ends with the bits of one never stopped."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tandem import cli
from tests.e2e import kills

QUICKSTART = Path(str(files("tandem"))) / "assets" / "quickstart"

SIZE = [
    *("quickstart", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2", "ppo.max_num_steps=5"),
    *("policy.train_global_batch_size=4", "data.train.size=32", "data.validation=null", "logger.tensorboard=false"),
    "cluster.deterministic=true",
    *("checkpointing.save_period=1", "logger.timeline=false"),
]
HARD = ["ppo.ppo_epochs=2", "ppo.use_dynamic_sampling=true", "ppo.policy_training_start_step=2"]


class Whole:
    """The run that was never stopped."""

    def __init__(self, folder: Path) -> None:
        self.arguments = [*SIZE, *HARD]
        started = time.perf_counter()
        kills.run_to_the_end([*self.arguments, f"run_dir={folder}"])
        self.seconds = time.perf_counter() - started
        self.end = kills.ended_with(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    kills.run_to_the_end([*SIZE, f"run_dir={tmp_path_factory.mktemp('warm')}", "ppo.max_num_steps=1"])
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment_it_ends_with_the_same_bits(tmp_path: Path, whole: Whole, moment: int):
    arguments = [*whole.arguments, f"run_dir={tmp_path}"]
    share = kills.moments(10, 1.0, seed=5)[moment]
    kills.kill_after(arguments, share * whole.seconds)
    kills.run_to_the_end(arguments)
    assert kills.ended_with(tmp_path) == whole.end


@pytest.mark.parametrize("part", range(8))
def test_killed_inside_a_write_it_ends_with_the_same_bits(tmp_path: Path, whole: Whole, part: int):
    arguments = [*whole.arguments, f"run_dir={tmp_path}"]
    # The third save: 8 places from its first flush to its last. A checkpoint of this run has about 18.
    process = kills.start(arguments, kill_at_flush=2 * 20 + int(part * 20 / 8))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    kills.run_to_the_end(arguments)
    assert kills.ended_with(tmp_path) == whole.end


def test_save_resume_save_resume_is_the_same_too(tmp_path: Path, whole: Whole):
    arguments = [*whole.arguments, f"run_dir={tmp_path}"]
    for _ in range(40):
        if not kills.kill_after(arguments, 0.75 * whole.seconds):
            break
    assert kills.ended_with(tmp_path) == whole.end


def test_sigterm_saves_and_ends_with_its_own_code(tmp_path: Path):
    arguments = [*SIZE, f"run_dir={tmp_path}", "ppo.max_num_steps=400", "checkpointing.save_period=399"]
    process = kills.start(arguments)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("rollout/reward") >= 2) and time.monotonic() < deadline:
        process.join(timeout=0.02)
    process.terminate()
    process.join()
    assert process.exitcode == 143
    state = next((tmp_path / "checkpoints").glob("step_*/state.json"))
    assert json.loads(state.read_text())["controller"]["step"] >= 2


def test_the_time_limit_saves_and_ends(tmp_path: Path):
    limit = "checkpointing.checkpoint_must_save_by=00:00:00:01"
    process = kills.start([*SIZE, f"run_dir={tmp_path}", "ppo.max_num_steps=4000", limit])
    process.join()
    assert process.exitcode == 75
    assert list((tmp_path / "checkpoints").glob("step_*/COMPLETE"))


@pytest.mark.parametrize("lead", [0, 2])
def test_saving_in_the_background_gives_checkpoints_that_resume(tmp_path: Path, lead: int):
    overlap = [f"async_rl.sampler.max_lookahead_versions={lead}", "checkpointing.async_save=true"]
    arguments = [*SIZE, *overlap, f"run_dir={tmp_path}"]
    kills.run_to_the_end([*arguments, "ppo.max_num_steps=3"])
    kills.run_to_the_end(arguments)
    _, steps = kills.ended_with(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["rollout/samples"] for step in steps] == [8] * 5
    if lead == 0:
        kills.run_to_the_end([*SIZE, f"run_dir={tmp_path / 'plain'}"])
        assert kills.ended_with(tmp_path)[0] == kills.ended_with(tmp_path / "plain")[0]


def limited(arguments: list[str], size: int) -> None:
    """A process in which no file may grow past `size` bytes: what a full disk does to a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    kills.main(arguments, None)


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_checkpoint_intact(tmp_path: Path):
    arguments = [*SIZE, f"run_dir={tmp_path}"]
    kills.run_to_the_end([*arguments, "ppo.max_num_steps=2"])
    process = kills.CONTEXT.Process(target=limited, args=(arguments, 1_000_000))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000002\n"
    kills.run_to_the_end(arguments)
    assert [step["step"] for step in kills.ended_with(tmp_path)[1]] == [1, 2, 3, 4, 5]


def test_a_critic_may_start_warm_from_another_run(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    kills.run_to_the_end([*SIZE, f"run_dir={first}"])
    warm = f"value.warm_start={first / 'checkpoints' / 'step_000005' / 'critic'}"
    kills.run_to_the_end([*SIZE, f"run_dir={second}", warm, "ppo.max_num_steps=1", "seed=7"])
    cold_start = kills.ended_with(first)[1][0]["critic/value_mean"]
    warm_start = kills.ended_with(second)[1][0]["critic/value_mean"]
    assert cold_start == 0.0
    assert warm_start > 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed=7", "seed was 42 and is 7"),
        ("ppo.num_prompts_per_step=8", "num_prompts_per_step was 4 and is 8"),
        ("ppo.adv_estimator={name: rloo}", "adv_estimator.name was 'gae' and is 'rloo'"),
        ("data.train.size=64", "data.train was"),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path: Path, monkeypatch, capfd, change: str, said: str):
    kills.run_to_the_end([*SIZE, f"run_dir={tmp_path}", "ppo.max_num_steps=1"])
    critic = ["value=null", "value_loss_fn=null"] if "rloo" in change else []
    assert said in refusal([f"run_dir={tmp_path}", change, *critic], monkeypatch, capfd)


@pytest.mark.parametrize("another", ["model", "tokenizer"])
def test_another_model_or_tokenizer_is_refused_with_both(tmp_path: Path, monkeypatch, capfd, another: str):
    kills.run_to_the_end([*SIZE, f"run_dir={tmp_path / 'run'}", "ppo.max_num_steps=1"])
    folder = tmp_path / "other"
    shutil.copytree(QUICKSTART, folder)
    if another == "model":
        config = LlamaConfig.from_pretrained(folder, num_hidden_layers=2)
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text() + " ")
    said = refusal([f"run_dir={tmp_path / 'run'}", f"policy.model_name={folder}"], monkeypatch, capfd)
    assert f"the {'policy' if another == 'model' else 'tokenizer'}" in said
    assert ("4 layers" in said and "2 layers" in said) == (another == "model")


def refusal(changes: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """What a run in this process says as it refuses its input."""
    monkeypatch.setattr(sys, "argv", ["tandem", "train", *SIZE, *changes])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capfd.readouterr().err


def test_another_line_in_the_same_directory_sets_the_later_checkpoints_aside(tmp_path: Path):
    arguments = [*SIZE, f"run_dir={tmp_path}", "checkpointing.keep_last_n=9"]
    kills.run_to_the_end(arguments)
    older = tmp_path / "checkpoints" / "step_000002"
    kills.run_to_the_end([*arguments, f"checkpointing.resume={older}", "ppo.max_num_steps=3"])
    assert sorted(p.name for p in (tmp_path / "checkpoints-1").iterdir()) == [f"step_{n:06d}" for n in (3, 4, 5)]
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == [f"step_{n:06d}" for n in (1, 2, 3)]
    kills.run_to_the_end([*arguments, "checkpointing.resume=never", "ppo.max_num_steps=1"])
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000001\n"
    assert len(list((tmp_path / "checkpoints-2").iterdir())) == 3
    kills.run_to_the_end([str(tmp_path), "ppo.max_num_steps=2"])  # the kept config says auto: it goes on
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000002\n"
