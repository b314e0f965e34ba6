"""`tandem export`: what transformers loads is what was trained; nothing is lost on the way, or by it."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tandem import cli
from tandem.config import Config
from tandem.config.load import load
from tandem.config.models import Tokenizer
from tandem.data.chat import Chat
from tandem.launch.export import export_target
from tandem.launch.models import load_causal_lm
from tandem.launch.trainers import support_of
from tandem.train.backend import Output, Pack
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.packs import pack_rows
from tandem.train.torch.backend import TorchBackend, build_torch_backend
from tandem.types import Batch
from tests.e2e.runs import run, short_config

QUICKSTART = Path(str(files("tandem"))) / "assets" / "quickstart"
TOKENS = torch.arange(16) + 40  # ALIGNMENT of them: the pack has no tail
ONE_STEP = ("ppo.max_num_steps=1", "policy.optimizer.lr=1e-3")
SAVED = "checkpoints/step_000001"
DEFAULTS = {"model": "actor", "best": False, "dtype": None, "overwrite": False}


def reward(question: str, answer: str, response: str) -> float:
    """Something that a random model gets, now more, now less."""
    return len(response) % 7 / 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart: a tied llama, float32, a scalar critic; two steps, the first with the higher score."""
    run_dir = tmp_path_factory.mktemp("trained")
    scored = ("checkpointing.metric_name=train:run/version", "checkpointing.higher_is_better=false")
    run(short_config(*ONE_STEP, *scored, "ppo.max_num_steps=2"), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a local qwen2: biases, an output layer of its own, bfloat16, a critic of bins, a template file."""
    place = tmp_path_factory.mktemp("foreign")
    shutil.copytree(QUICKSTART, place / "base")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    positions = {"num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 256}
    Qwen2ForCausalLM(Qwen2Config(**shape, **positions, tie_word_embeddings=False)).save_pretrained(place / "base")
    template = (QUICKSTART / "chat_template.jinja").read_text() + "{# ours #}"
    (place / "ours.jinja").write_text(template)
    (place / "base" / "generation_config.json").write_text('{"temperature": 0.6}')  # transformers will not save this
    changes = (
        f"policy.model_name={place / 'base'}",
        f"policy.tokenizer.chat_template={place / 'ours.jinja'}",
        "policy.precision=bfloat16",
        "policy.generation.temperature=0.8",
        "policy.generation.stop_token_ids=[7]",
        "value_loss_fn={name: hl_gauss, num_bins: 9, value_max: 2.0}",
        "env.verifier={name: python, target: 'tests.launch.test_export:reward'}",
    )
    run(short_config(*ONE_STEP, *changes), place / "run")
    return place / "run"


def export(target: Path, out: Path, *overrides: str, **options: object) -> Path:
    return export_target(str(target), str(out), overrides, **(DEFAULTS | options))


def backend_of(run_dir: Path, name: str) -> tuple[Config, TorchBackend]:
    """The trainer's own model, in float32, with the weights of the first checkpoint."""
    config = load(str(run_dir / SAVED / "config.yaml"), ["policy.precision=float32"]).config
    cpu = torch.device("cpu")
    model = load_causal_lm(config.policy.model_name, dtype=torch.float32, device=cpu, trust_remote_code=False)
    head: TokenLogprobs | ValueHead
    if name == "critic":
        assert config.value_loss_fn is not None
        head = ValueHead(model.config.get_text_config().hidden_size, support=support_of(config.value_loss_fn))
    else:
        temperature = config.policy.generation.temperature
        head = TokenLogprobs(model.get_output_embeddings(), temperature=temperature, chunk_size=32)
    backend = build_torch_backend(model, head, config.policy, total_optimizer_steps=None, device=cpu)
    backend.load_weights(run_dir / SAVED / name)
    return config, backend


def pack() -> Pack:
    columns = {"tokens": [TOKENS], "mask": [torch.arange(len(TOKENS)) > 0]}
    return pack_rows(Batch((0,), (len(TOKENS),), (0,)), columns, [0])


def output_of(backend: TorchBackend) -> Output:
    return next(backend.infer([pack()]))


@pytest.mark.parametrize("name", ["trained", "foreign"])
@torch.no_grad()
def test_an_exported_actor_has_the_logprobs_of_the_trained_one(name: str, request, tmp_path: Path):
    run_dir = request.getfixturevalue(name)
    out = export(run_dir / SAVED, tmp_path / "out", dtype="float32")
    config, backend = backend_of(run_dir, "actor")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    logits = model(TOKENS[None]).logits[0] / config.policy.generation.temperature
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, TOKENS[1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, output_of(backend).column_P[1:], rtol=0, atol=1e-5)
    state = model.state_dict()
    for key, tensor in load_file(run_dir / SAVED / "actor" / "model.safetensors").items():
        assert torch.equal(state[key], tensor), key
    base = load_causal_lm(
        config.policy.model_name, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False
    )
    assert (base(TOKENS[None]).logits - model(TOKENS[None]).logits).abs().max() > 1e-3  # it has learned


@pytest.mark.parametrize(("name", "labels"), [("trained", 1), ("foreign", 9)])
@torch.no_grad()
def test_an_exported_critic_has_the_values_of_the_trained_one_as_its_readme_says(
    name: str, labels: int, request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = request.getfixturevalue(name)
    out = export(run_dir / SAVED, tmp_path / "out", dtype="float32", model="critic")
    _, backend = backend_of(run_dir, "critic")
    wanted = output_of(backend)
    assert wanted.after_P is not None
    assert wanted.after_P.abs().max() > 0  # it has learned
    model = AutoModelForTokenClassification.from_pretrained(out)
    assert model.config.num_labels == labels
    monkeypatch.chdir(out)
    names = {"input_ids": TOKENS[None]}
    exec((out / "README.md").read_text().split("```")[1].removeprefix("python"), names)
    torch.testing.assert_close(names["after"], wanted.after_P, rtol=0, atol=1e-5)
    torch.testing.assert_close(names["before"][1:], wanted.column_P[1:], rtol=0, atol=1e-5)
    if labels > 1:
        assert [float(model.config.id2label[k]) for k in (0, labels - 1)] == pytest.approx([1 / 9, 17 / 9], abs=1e-5)


def test_an_export_generates_by_the_law_of_the_run(foreign: Path, tmp_path: Path):
    out = export(foreign, tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16  # the recipe's precision
    assert tokenizer.chat_template.endswith("{# ours #}")
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.max_new_tokens) == (True, 0.8, 0, 28)
    assert settings.eos_token_id == [tokenizer.eos_token_id, 7]
    chat = [{"role": "user", "content": "how many?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids)
    assert ids["input_ids"].shape[1] < written.shape[1] <= ids["input_ids"].shape[1] + 28


@pytest.mark.parametrize("name", ["trained", "foreign"])
def test_the_exported_tokenizer_is_the_one_of_the_run(name: str, request, tmp_path: Path):
    run_dir = request.getfixturevalue(name)
    out = export(run_dir, tmp_path / "out", model="critic")
    then = json.loads((run_dir / SAVED / "state.json").read_text())["identity"]["exact"]["the tokenizer"]
    assert Chat(AutoTokenizer.from_pretrained(out), Tokenizer()).fingerprint == then


def test_everyone_may_read_it_and_nothing_else_is_left(trained: Path, tmp_path: Path):
    out = export(trained, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    names = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert names <= {path.name for path in out.iterdir()}


def test_newest_best_and_sound_are_told_apart(trained: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    (run_dir / "checkpoints" / "step_000002" / "actor" / "model.safetensors").write_bytes(b"torn")
    assert "step 1" in (export(run_dir, tmp_path / "a") / "README.md").read_text().splitlines()[0]
    assert "step 2" in (export(trained, tmp_path / "b") / "README.md").read_text().splitlines()[0]
    assert "step 1" in (export(trained, tmp_path / "c", best=True) / "README.md").read_text().splitlines()[0]
    with pytest.raises(ValueError, match="torn"):
        export(run_dir / "checkpoints" / "step_000002", tmp_path / "d")
    (run_dir / "checkpoints" / "best").unlink()
    with pytest.raises(ValueError, match="no best checkpoint"):
        export(run_dir, tmp_path / "d", best=True)


def test_nothing_but_an_earlier_export_is_overwritten(trained: Path, tmp_path: Path):
    out = export(trained, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ValueError, match="--overwrite"):
        export(trained, out)
    assert json.loads((export(trained, out, overwrite=True) / "config.json").read_text())["dtype"] == "float32"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for place, said in {
        mine: "does not look like an export",
        trained / SAVED / "hf": "inside a checkpoint",
        QUICKSTART: "began with",
    }.items():
        with pytest.raises(ValueError, match=said):
            export(trained, place, overwrite=True)
    assert (mine / "thesis.txt").read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_full_disk_leaves_the_earlier_export(trained: Path, tmp_path: Path):
    out = export(trained / SAVED, tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RuntimeError, match="could not be written"):
            export(trained, out, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 1" in (out / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_commands_reach_export_and_show(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    for code, arguments in [
        (0, ["export", str(trained), str(tmp_path / "out"), "--model", "critic", "--dtype", "bfloat16", "--best"]),
        (2, ["export", str(trained), str(tmp_path / "out"), "policy.trust_remote_code=false"]),
        (0, ["show", str(trained)]),
    ]:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    printed = capfd.readouterr()
    assert "--overwrite" in printed.err
    assert "step_000002" in printed.out


def test_a_base_or_tokenizer_that_has_changed_since_is_refused(trained: Path, foreign: Path, tmp_path: Path):
    base = foreign.parent / "base"
    with pytest.raises(ValueError, match=r"is no .*base"):
        export(trained, tmp_path / "out", f"policy.model_name={base}", "policy.tokenizer.name=quickstart")
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}!{% endfor %}")
    with pytest.raises(ValueError, match="no longer the one"):
        export(trained, tmp_path / "out", f"policy.tokenizer.chat_template={template}")
    assert [path.name for path in tmp_path.iterdir()] == ["other.jinja"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"model": "reference"}, "actor, critic"), ({"dtype": "int8"}, "float32, bfloat16")],
)
def test_wrong_options_are_refused(trained: Path, tmp_path: Path, options: dict[str, str], said: str):
    with pytest.raises(ValueError, match=said):
        export(trained, tmp_path / "out", **options)
    for target in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="run directory"):
            export(target, tmp_path / "out")
