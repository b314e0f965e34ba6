"""`tandem import-config`: a recipe in a file or alone on standard output, and a table that names every key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem import cli
from tandem.config.load import load
from tandem.launch.import_config import import_file

FILES = Path(__file__).parents[1] / "config" / "nemo_rl"


def test_the_recipe_is_written_and_the_table_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "mine.yaml"
    assert import_file(FILES / "grpo_megatron_async.yaml", output, overwrite=False)
    config = load(str(output)).config
    assert config.policy.backend.name == "megatron"
    printed = capsys.readouterr().out
    assert "mine.yaml passes the check" in printed
    assert "185 keys:" in printed


def test_without_a_file_the_recipe_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import_file(FILES / "ppo.yaml", None, overwrite=False)
    printed = capsys.readouterr()
    recipe = tmp_path / "from_output.yaml"
    recipe.write_text(printed.out)
    assert load(str(recipe), ["data.system_prompt=c"]).config.ppo is not None
    assert "131 keys:" in printed.err
    assert "to be filled in (written as ???): data.system_prompt" in printed.err
    assert "the recipe passes the check once that is done" in printed.err


def test_a_file_that_is_there_is_kept(tmp_path: Path):
    output = tmp_path / "mine.yaml"
    output.write_text("mine")
    with pytest.raises(ValueError, match="--overwrite"):
        import_file(FILES / "ppo.yaml", output, overwrite=False)
    assert output.read_text() == "mine"
    assert import_file(FILES / "ppo.yaml", output, overwrite=True)


def test_what_the_check_refuses_is_said_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "odd.yaml"
    path.write_text(f"defaults: {FILES / 'ppo.yaml'}\nppo: {{num_prompts_per_step: 15}}\n")
    output = tmp_path / "mine.yaml"
    monkeypatch.setattr(sys, "argv", ["tandem", "import-config", str(path), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "the check refuses: policy.train_global_batch_size = 32" in capsys.readouterr().out
    assert output.is_file()


def test_a_file_of_another_trainer_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "sft.yaml"
    path.write_text("sft: {max_num_steps: 1}\n")
    monkeypatch.setattr(sys, "argv", ["tandem", "import-config", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no PPO or GRPO config of NeMo-RL" in capsys.readouterr().err
