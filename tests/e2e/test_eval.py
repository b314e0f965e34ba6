"""Training on GSM8K's rows and `tandem eval`, as a user types them: runs, checkpoints, models, and wrong input."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "gsm8k_ppo.yaml")
SHARED = ROOT.parent / "shared" / "data" / "gsm8k"
QUICKSTART = str(Path(str(files("tandem"))) / "assets" / "quickstart")
ROWS = [
    ("Tom has 4 pens and buys 3 more. How many pens?", "He has 4+3=<<4+3=7>>7 pens.\n#### 7"),
    ("Eva has 1,200 coins and loses 200. How many coins?", "1200-200=<<1200-200=1000>>1,000\n#### 1,000"),
    ("Ben reads 2 books a week. How many in 5 weeks?", "2*5=<<2*5=10>>10\n#### 10"),
    ("Mia shares 9 shells among 3. How many each?", "9/3=<<9/3=3>>3\n#### 3"),
]
SMALL = [
    *("policy.model_name=quickstart", "ppo.num_prompts_per_step=2", "ppo.num_generations_per_prompt=2"),
    *("ppo.max_num_steps=2", "ppo.policy_training_start_step=1", "policy.scheduler.warmup_steps=0"),
    *("policy.train_global_batch_size=4", "policy.generation.max_new_tokens=8", "logger.tensorboard=false"),
]
BRIEF = "policy.generation.max_new_tokens=8"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows in the form of GSM8K's."""
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    return file


def answers_of(printed: str) -> list[dict]:
    """The answers of the file that the command names."""
    file = Path(printed.rsplit("answers: ", 1)[1].split("\n")[0].strip())
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_gsm8k_rows_train_two_steps_and_the_run_is_scored(tandem, rows: Path):
    code, printed = tandem("train", RECIPE, *SMALL, f"data.train.path={rows}", "run_dir=run")
    assert code == 0, printed
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    sampled = [*("--k", "2", "--temperature", "1"), *("--limit", "3", "--batch", "2")]
    for target in ("run", "run/checkpoints/step_000002"):
        code, printed = tandem("eval", target, "--data", f"gsm8k:{rows}", *sampled)
        assert code == 0, printed
        for part in ("step_000002", "val/accuracy", "val/pass@2", "val/mean@2", "temperature 1", "verifier gsm8k"):
            assert part in printed
        answers = answers_of(printed)
        assert [(one["id"], one["sample"]) for one in answers] == [
            (f"gsm8k.jsonl:{n}", k) for n in (1, 2, 3) for k in (0, 1)
        ]
        assert answers[2]["answer"] == "1000"
    assert len(list(Path("run/evals").iterdir())) == 2
    metrics = json.loads((next(Path("run/evals").iterdir()) / "metrics.json").read_text())
    assert metrics["val/length"] <= 8


@pytest.mark.skipif(not SHARED.is_dir(), reason="the rows of GSM8K are not there")
def test_the_public_rows_of_gsm8k_train_two_steps_and_the_test_rows_are_scored(tandem):
    code, printed = tandem("train", RECIPE, *SMALL, f"data.train.path={SHARED / 'train.jsonl'}", "run_dir=run")
    assert code == 0, printed
    assert "2/2" in printed
    code, printed = tandem("eval", "run", "--data", str(SHARED / "test.jsonl"), "--limit", "16")
    assert code == 0, printed
    assert [one["id"] for one in answers_of(printed)] == [f"test.jsonl:{number}" for number in range(1, 17)]


def test_a_model_folder_is_scored_on_several_sets(tandem, rows: Path):
    size = ["--limit", "4", BRIEF, "policy.precision=float32"]
    code, printed = tandem(
        "eval", QUICKSTART, "--data", f"gsm8k:{rows}", "--data", "arithmetic", *size, "--out", "here"
    )
    assert code == 0, printed
    assert "as it is): greedy, 1 a prompt, at most 8 new tokens" in printed
    assert [one["set"] for one in answers_of(printed)] == ["gsm8k"] * 4 + ["arithmetic"] * 4
    metrics = json.loads(Path("here/metrics.json").read_text())
    assert {"val/accuracy", "val/gsm8k/accuracy", "val/arithmetic/accuracy"} <= metrics.keys()


def test_an_exported_model_scores_as_its_checkpoint(tandem):
    size = ["ppo.num_prompts_per_step=2", "policy.train_global_batch_size=8", "ppo.max_num_steps=1"]
    code, printed = tandem("train", "quickstart", *size, "data.validation=null", "run_dir=run")
    assert code == 0, printed
    code, printed = tandem("export", "run", "exported")
    assert code == 0, printed
    asked = ["--data", "arithmetic", "--limit", "24", "--temperature", "1"]
    code, of_run = tandem("eval", "run", *asked)
    assert code == 0, of_run
    same = ["policy.generation.max_new_tokens=28", "data.prompt_template='{question}'", "seed=42"]
    code, of_export = tandem("eval", "exported", *asked, *same, "--verifier", "arithmetic")
    assert code == 0, of_export
    assert "verifier arithmetic" in of_export
    assert answers_of(of_export) == answers_of(of_run)


def test_a_recipes_own_validation_is_scored_as_the_recipe_says(tandem):
    code, printed = tandem("eval", "quickstart", "data.validation.size=8", "ppo.max_val_samples=6")
    assert code == 0, printed
    assert "untrained" in printed
    assert len(answers_of(printed)) == 6


def bad_inputs(rows: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> (arguments after `eval`, what the message must say)."""
    (rows.parent / "full").mkdir()
    (rows.parent / "full" / "file").touch()
    (rows.parent / "empty").mkdir()
    (rows.parent / "torn.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{"question"')
    (rows.parent / "words.jsonl").write_text('{"question": "q", "answer": "five"}\n')
    (rows.parent / "model").mkdir()
    (rows.parent / "model" / "config.json").write_text("{")
    data = ["--data", f"gsm8k:{rows}"]
    return {
        "no data": ([QUICKSTART], "say what to score with --data"),
        "no such data": ([QUICKSTART, "--data", "gsm9k"], "no such file or folder"),
        "no network": ([QUICKSTART, "--data", "gsm8k"], "data.validation.path=FILE"),
        "torn row": ([QUICKSTART, "--data", str(rows.parent / "torn.jsonl")], "torn.jsonl:2: is not JSON"),
        "no number": ([QUICKSTART, "--data", str(rows.parent / "words.jsonl")], "compares numbers"),
        "no target": (["nowhere.yaml", *data], "no recipe 'nowhere.yaml'"),
        "no run": ([str(rows.parent / "empty"), *data], "neither a run directory"),
        "no such model": (["someone/nothing", *data], "could not be loaded"),
        "torn model": ([str(rows.parent / "model"), *data], "could not be loaded"),
        "no verifier": ([QUICKSTART, *data, "--verifier", "gsm9k"], "did you mean gsm8k"),
        "k of one greedy answer": ([QUICKSTART, *data, "--k", "4"], "val_temperature = 0.0 (default): set that above"),
        "k of nothing": ([QUICKSTART, *data, "--k", "0"], "num_val_generations_per_prompt"),
        "twice": ([QUICKSTART, *data, "--limit", "3", "grpo.max_val_samples=3"], "--limit and grpo.max_val_samples"),
        "out is there": ([QUICKSTART, *data, "--out", str(rows.parent / "full")], "new or empty"),
        "unknown key": ([QUICKSTART, *data, "policy.generation.max_tokens=3"], "max_new_tokens"),
    }


CASES = [
    *("no data", "no such data", "no network", "torn row", "no number", "no target", "no run", "no such model"),
    *("torn model", "no verifier", "k of one greedy answer", "k of nothing", "twice", "out is there", "unknown key"),
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_message_and_exit_code_2(tandem, rows: Path, case: str):
    arguments, said = bad_inputs(rows)[case]
    code, printed = tandem("eval", *arguments)
    assert code == 2, printed
    assert said in printed
    assert "Traceback" not in printed
