"""The command line as a user meets it: wrong input is one clear message, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

from tandem import cli

QUICKSTART = Path(str(files("tandem"))) / "assets" / "quickstart"


def model_without(tmp_path: Path, *, template: bool = True, eos: bool = True) -> Path:
    """A copy of the quickstart model that lacks something."""
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART, model)
    if not template:
        (model / "chat_template.jinja").unlink()
    if not eos:
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    return model


def rows(tmp_path: Path, *records: object) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"data.train={{name: file, path: {file}}}"


BAD_REWARD = """
def raises(question, answer, response):
    raise KeyError("no such thing")

def nan(question, answer, response):
    return float("nan")
"""


def bad_inputs(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> (arguments after `train`, what the message must say)."""
    (tmp_path / "torn.yaml").write_text("ppo: [1, 2\npolicy: {")
    (tmp_path / "my_rewards.py").write_text(BAD_REWARD)
    short, long = ({"question": "how many? " * times, "answer": "3"} for times in (1, 300))
    return {
        "no recipe": (["quickstrat"], "did you mean quickstart"),
        "no file": (["./nothing.yaml"], "no recipe"),
        "torn yaml": (["torn.yaml"], "torn.yaml:"),
        "no model": (["quickstart", "policy.model_name=./nowhere"], "no such directory"),
        "no template": (
            ["quickstart", f"policy.model_name={model_without(tmp_path / 'a', template=False)}"],
            "chat template",
        ),
        "no eos": (["quickstart", f"policy.model_name={model_without(tmp_path / 'b', eos=False)}"], "eos"),
        "long prompt": (["quickstart", rows(tmp_path / "a", short, long)], "data.on_too_long=skip"),
        "empty data": (["quickstart", rows(tmp_path / "b")], "empty"),
        "no data file": (["quickstart", "data.train={name: file, path: none.jsonl}"], "none.jsonl"),
        "no field": (["quickstart", rows(tmp_path, {"prompt": "x", "answer": "1"})], "question"),
        "longer than the model": (
            ["quickstart", "policy.max_total_sequence_length=4000", "policy.sequence_packing.train_mb_tokens=4000"],
            "positions",
        ),
        "no reward function": (["quickstart", "env.verifier={name: python, target: 'nowhere:f'}"], "nowhere"),
        "reward raises": (["quickstart", "env.verifier={name: python, target: 'my_rewards:raises'}"], "no such thing"),
        "reward is NaN": (["quickstart", "env.verifier={name: python, target: 'my_rewards:nan'}"], "nan"),
        "no gpu": (["quickstart", "cluster.device=cuda"], "cluster.device=cpu"),
    }


CASES = [
    *("no recipe", "no file", "torn yaml", "no model", "no template", "no eos", "long prompt", "empty data"),
    *("no data file", "no field", "longer than the model", "no reward function", "reward raises", "reward is NaN"),
    "no gpu",
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_message_and_exit_code_2(tandem, tmp_path: Path, monkeypatch, case: str):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments, said = bad_inputs(tmp_path)[case]
    code, printed = tandem("train", *arguments)
    assert code == 2, printed
    assert said.lower() in printed.lower()
    assert "Traceback" not in printed


def test_debug_shows_the_traceback(tandem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["tandem", "train", "quickstart", "policy.model_name=./nowhere", "--debug"])
    with pytest.raises(ValueError, match="no such directory"):
        cli.main()


def test_train_resume_and_eval_tell_one_story(tandem):
    size = ["ppo.num_prompts_per_step=2", "policy.train_global_batch_size=8", "data.validation.size=8"]
    code, printed = tandem("train", "quickstart", *size, "ppo.max_num_steps=2", "run_dir=first")
    assert code == 0, printed
    assert "accuracy" in printed
    assert "first" in printed
    steps = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "rollout/reward" in record] == [1, 2]
    json.loads(Path("first/timeline.json").read_text())
    code, printed = tandem("train", "first", "ppo.max_num_steps=3")
    assert code == 0, printed
    steps = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "rollout/reward" in record] == [1, 2, 3]
    code, printed = tandem("eval", "first")
    assert code == 0, printed
    assert "step_000003" in printed
    last = next(record for record in reversed(steps) if "val/accuracy" in record)
    assert f"{last['val/accuracy']:.4g}" in printed


def test_help_is_fast_and_loads_no_torch():
    code = "import sys; sys.argv=['tandem','--help']\nfrom tandem.cli import app\n"
    code += "app(standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    times = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    assert min(times) < 1.0


def test_python_m_tandem_is_tandem():
    done = subprocess.run([sys.executable, "-m", "tandem", "check", "quickstart"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "num_prompts_per_step: 16" in done.stdout
