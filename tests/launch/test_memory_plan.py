"""The memory plan of recipes: what they hold where, which fit, which are refused, and what is named to mend them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import app
from tandem.config import Config
from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.loaded import Loaded
from tandem.config.recipes import shipped_recipes
from tandem.launch.memory.changes import ways_to_fit
from tandem.launch.memory.plan import GIB, MemoryPlan, Phase, plan
from tandem.launch.memory.report import refuse_what_cannot_fit, report
from tandem.launch.memory.sizes import ModelSize, size_of
from tandem.launch.models import shape_of
from tandem.launch.session import train

QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"]}
MODELS = {
    "smollm2": {
        **{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    },
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN
    | {
        **{"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
        **{"intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": QWEN
    | {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    },
}
GPU = 79.1  # GiB that torch finds on a GPU of "80 GB", the one that recipes name; H200s have 139.8
SMALL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for number, (name, shape) in enumerate(MODELS.items()):
        found[name] = tmp_path_factory.mktemp(f"model{number}")
        (found[name] / "config.json").write_text(json.dumps(shape))
    return found


@pytest.fixture(scope="session")
def sizes(folders: dict[str, Path]) -> dict[str, ModelSize]:
    places = {name: str(folder) for name, folder in folders.items()} | {"quickstart": "quickstart"}
    return {name: size_of(shape_of(place, trust_remote_code=False)) for name, place in places.items()}


def planned(config: Config, sizes: dict[str, ModelSize], gib: float | None) -> MemoryPlan:
    size = sizes[config.policy.model_name]
    parts = ["actor", *["critic"] * bool(config.value), *["reference"] * bool(config.reference)]
    return plan(config, dict.fromkeys(parts, size), None if gib is None else int(gib * GIB))


def recipe(*overrides: str) -> Loaded:
    return load("gsm8k_ppo", ["data.train.path=train.jsonl", f"policy.model_name={SMALL}", *overrides])


def phase(found: MemoryPlan, name: str) -> Phase:
    return next(phase for gpu in found.gpus for phase in gpu.phases if phase.name == name)


def completed(name: str) -> Loaded:
    """A shipped recipe; what it leaves open is given as its error says."""
    try:
        return load(name)
    except ConfigError as error:
        return load(name, [re.search(r"e\.g\. (\S+)", message)[1] for message in error.messages])


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_fits_the_gpus_it_names(name: str, sizes: dict[str, ModelSize]):
    config = completed(name).config
    if config.policy.model_name == "path/to/model":  # whichever: the largest that such recipes speak of
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"model_name": SMALL})})
    found = planned(config, sizes, GPU)
    assert not found.over, [(p.name, p.held.total / GIB) for _, p in found.over]


def test_an_update_is_the_sum_of_its_parts_and_of_what_others_leave(sizes: dict[str, ModelSize]):
    size, update = sizes[SMALL], phase(planned(recipe().config, sizes, 80), "policy update").held
    assert update.weights == (6 + 6 + 2) * size.whole  # actor, critic, and the engine, which does not sleep
    assert update.gradients == 4 * size.whole
    assert update.optimizer == 2 * 8 * size.whole


def test_a_recipe_that_fits_is_not_refused_and_one_that_does_not_names_three_ways_that_do(sizes: dict[str, ModelSize]):
    loaded = recipe("policy.activation_checkpointing=none")
    assert not planned(loaded.config, sizes, 80).over
    over = planned(loaded.config, sizes, 40)
    assert over.over[0][1].name == "policy update"
    ways = ways_to_fit(loaded, lambda config: planned(config, sizes, 40))
    assert len(ways) == 3
    for change, after in ways:
        assert not after.over
        mended = recipe("policy.activation_checkpointing=none", *change.text.split())
        assert not planned(mended.config, sizes, 40).over
    assert [change.cost for change, _ in ways] == sorted(change.cost for change, _ in ways)


@pytest.mark.parametrize(
    ("change", "name", "part"),
    [
        ("value.offload=all", "policy update", "optimizer"),
        ("policy.offload=optimizer", "log-probs", "optimizer"),
        ("policy.sequence_packing.train_mb_tokens=2048", "policy update", "activations"),
        ("value.sequence_packing.train_mb_tokens=2048", "critic update", "activations"),
        ("policy.logprob_chunk_size=256", "policy update", "logits"),
        ("policy.generation.engine.max_concurrent_samples=16", "generate", "cache"),
        ("policy.precision=float32", "policy update", "activations"),
    ],
)
def test_a_knob_moves_the_part_it_is_about(change: str, name: str, part: str, sizes: dict[str, ModelSize]):
    before = vars(phase(planned(recipe().config, sizes, 80), name).held)[part]
    after = vars(phase(planned(recipe(change).config, sizes, 80), name).held)[part]
    assert (after > before) == ("float32" in change)
    assert after != before


def test_checkpointing_orders_what_is_kept(sizes: dict[str, ModelSize]):
    modes = [recipe(f"policy.activation_checkpointing={mode}") for mode in ("none", "selective", "full")]
    totals = [phase(planned(loaded.config, sizes, 80), "policy update").held.activations for loaded in modes]
    assert totals == sorted(totals, reverse=True)


def test_ranks_share_what_their_layout_shares(sizes: dict[str, ModelSize]):
    ray = ["cluster.launch=ray", "cluster.gpus_per_node=4", "policy.activation_checkpointing=none"]
    size = sizes[SMALL]
    replicas, shards, tensor, context = (
        phase(planned(recipe(*ray, f"policy.parallel.{how}").config, sizes, 80), "policy update").held
        for how in (
            "data_parallel=replicate",
            "data_parallel=shard",
            "tensor_parallel_size=2",
            "context_parallel_size=4",
        )
    )
    critic = 8 * (size.whole // 4)
    assert replicas.optimizer == 8 * size.whole + critic
    assert shards.optimizer == pytest.approx(8 * size.whole / 4 + critic, rel=1e-3)
    assert tensor.optimizer == pytest.approx(8 * size.whole / 4 + critic, rel=1e-2)
    assert context.activations < 0.5 * shards.activations


def test_gpus_of_their_own_have_a_plan_of_their_own(sizes: dict[str, ModelSize]):
    own = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    found = planned(recipe("cluster.launch=ray", "cluster.gpus_per_node=8", own).config, sizes, 80)
    assert [(gpu.count, gpu.parts) for gpu in found.gpus] == [(2, ("engine",)), (6, ("critic", "actor"))]
    assert [phase.name for phase in found.gpus[0].phases] == ["generate", "weight sync"]


def test_vllm_sleeps_while_trainers_compute_unless_it_writes(sizes: dict[str, ModelSize]):
    vllm = "policy.generation.engine={name: vllm}"
    asleep = planned(recipe(vllm).config, sizes, 80)
    assert phase(asleep, "generate").held.cache > 30 * GIB
    assert phase(asleep, "policy update").held.cache == 0
    awake = planned(recipe(vllm, "async_rl.sampler.max_lookahead_versions=1").config, sizes, 80)
    assert phase(awake, "policy update").held.cache > 30 * GIB


def test_a_share_too_small_for_one_response_is_over(sizes: dict[str, ModelSize]):
    found = planned(recipe("policy.generation.engine={name: vllm, gpu_memory_utilization: 0.04}").config, sizes, 80)
    assert "one response" in [phase.name for _, phase in found.over]


def test_pipeline_stages_hold_layers_and_micro_batches(sizes: dict[str, ModelSize]):
    ray = ["cluster.launch=ray", "cluster.gpus_per_node=4"]
    sections = [f"{model}.backend={{name: megatron, pipeline_model_parallel_size: 2}}" for model in ("policy", "value")]
    one = [f"{model}.backend={{name: megatron}}" for model in ("policy", "value")]
    piped, whole = (
        phase(planned(recipe(*ray, *how).config, sizes, 80), "critic update").held for how in (sections, one)
    )
    assert piped.gradients < 0.7 * whole.gradients
    assert piped.activations == pytest.approx(whole.activations, rel=0.5)  # half the layers of two micro-batches


def test_check_prints_the_plan_and_what_to_change(folders: dict[str, Path]):
    arguments = ["check", "gsm8k_ppo", "data.train.path=train.jsonl", f"policy.model_name={folders[SMALL]}"]
    fits = CliRunner().invoke(app, [*arguments, "cluster.gpu_memory_gib=80"])
    assert fits.exit_code == 0
    assert "1 GPU of 80.0 GiB: engine, critic, actor" in fits.stdout
    assert "does not fit" not in fits.stdout
    small = CliRunner().invoke(app, [*arguments, "cluster.gpu_memory_gib=40"])
    assert "does not fit its GPUs: policy update takes 53.8 GiB" in small.stdout
    assert small.stdout.count("(then ") == 3


def test_check_says_that_a_plan_is_about_gpus_or_could_not_be_made(tmp_path: Path):
    def said(*overrides: str) -> str:
        console = Console(record=True, file=io.StringIO())
        for part in report(load("quickstart", overrides)):
            console.print(part)
        return console.export_text()

    assert "the plan is about GPUs" in said("cluster.device=cpu")
    assert "not planned" in said(f"policy.model_name={tmp_path}/nowhere")


def test_train_refuses_what_cannot_fit_before_it_starts(folders: dict[str, Path], caplog: pytest.LogCaptureFixture):
    def loaded(*overrides: str) -> Loaded:
        where = [f"policy.model_name={folders[SMALL]}", "cluster.device=cuda", "cluster.gpu_memory_gib=30"]
        return load("gsm8k_ppo", ["data.train.path=train.jsonl", *where, *overrides])

    with pytest.raises(ValueError, match=r"policy update takes 53\.8 GiB") as caught:
        refuse_what_cannot_fit(loaded())
    assert "cluster.memory_plan=warn" in str(caught.value)
    refuse_what_cannot_fit(loaded("cluster.memory_plan=warn"))
    assert "does not fit" in caplog.text
    refuse_what_cannot_fit(load("quickstart", ["cluster.device=cpu"]))  # a run on a CPU is not asked


def test_a_refused_run_leaves_no_directory_behind(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    own = [f"policy.model_name={folders[SMALL]}", "cluster.device=cuda", "cluster.gpu_memory_gib=30"]
    with pytest.raises(ValueError, match="does not fit its GPUs"):
        train(load("gsm8k_ppo", ["data.train.path=train.jsonl", *own]))
    assert not list(tmp_path.iterdir())


def test_a_family_that_is_not_known_is_planned_with_a_word_and_never_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shape = {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    own = [f"policy.model_name={tmp_path}", "cluster.device=cuda", "cluster.gpu_memory_gib=10"]
    refuse_what_cannot_fit(load("gsm8k_ppo", ["data.train.path=train.jsonl", *own]))
    assert "layers of gpt2 are counted as those of a Llama" in caplog.text
    assert "does not fit" in caplog.text
