"""vLLM on GPUs: what sleep frees and wake gives back; weights by handles and by NCCL; nothing leaks over 20 steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the package vllm: tandem-rl[vllm]")

from tandem.config.models import VllmEngine
from tandem.fingerprint import fingerprint
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.vllm.engine import vllm_engine
from tests.contracts.engine_kinds import PROMPTS, SAMPLED, write_all
from tests.e2e.runs import run, short_config
from tests.rollout.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GIB = 1 << 30
CACHE = 8 * GIB
COLOCATED = (
    "cluster.device=cuda",
    "policy.generation.engine.kv_cache_memory_bytes=8589934592",
    "policy.offload=all",
    "value.offload=all",
)


def play(directory: Path, scene: Callable[[ThreadedEngine], Coroutine[None, None, None]]) -> None:
    """A scene with an engine that can sleep."""
    tiny_model().save_pretrained(directory)
    section = VllmEngine(name="vllm", max_num_seqs=64, kv_cache_memory_bytes=CACHE, enforce_eager=True)

    async def body() -> None:
        engine = vllm_engine(
            section,
            model=str(directory),
            precision="float32",
            max_total_sequence_length=160,
            trust_remote_code=False,
            can_sleep=True,
        )
        try:
            await scene(engine)
        finally:
            await engine.close()

    asyncio.run(body())


def test_sleep_frees_the_cache_and_twenty_rounds_leak_nothing(tmp_path: Path):
    new = [tiny_model(seed=seed) for seed in (0, 1)]

    async def scene(engine: ThreadedEngine):
        before, asleep = await write_all(engine, PROMPTS, SAMPLED), []
        for round_ in range(20):
            await engine.pause()
            metrics = await engine.sleep(keep_weights=round_ % 2 == 0)
            used = {name: metric.value for name, metric in metrics.items()}
            assert used["gpu/used_before_sleep"] - used["gpu/used_after_sleep"] > 0.9 * CACHE
            asleep.append(used["gpu/used_after_sleep"])
            woken = {name: metric.value for name, metric in (await engine.wake()).items()}
            assert woken["gpu/used_after_wake"] - woken["gpu/used_before_wake"] < 0.5 * CACHE, "weights, no cache"
            if round_ % 2:
                weights = new[0].named_parameters()
                await engine.load_weights(round_, [(name, tensor.cuda()) for name, tensor in weights])
            assert await engine.fingerprint() == fingerprint(new[0].named_parameters())
            await engine.resume()
        after = await write_all(engine, PROMPTS, SAMPLED)
        assert [written.tokens for written in after] == [written.tokens for written in before]
        assert max(asleep[3:]) - min(asleep[3:]) < 64 << 20

    play(tmp_path, scene)


@pytest.mark.parametrize("launch", ["local", "ray"])
def test_colocated_engine_and_trainers_take_turns_and_leak_nothing_over_twenty_steps(launch: str, tmp_path: Path):
    """Under Ray weights go over by handles; the publisher proves them at every step."""
    if launch == "ray":
        pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    config = short_config(
        *COLOCATED,
        f"cluster.launch={launch}",
        "ppo.max_num_steps=20",
        "cluster.deterministic=false",
        recipe="quickstart_vllm",
    )
    records = [record for record in run(config, tmp_path).records if "gpu/used_after_sleep" in record]
    assert len(records) == 20
    for record in records:
        assert record["gpu/used_before_sleep"] - record["gpu/used_after_sleep"] > 0.9 * CACHE
    used = [record["gpu/used_after_sleep"] for record in records]
    assert max(used[3:]) - min(used[3:]) < 256 << 20


@pytest.mark.gpu(devices=2)
def test_an_engine_on_a_gpu_of_its_own_takes_weights_by_nccl(tmp_path: Path):
    pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    config = short_config(
        "cluster.device=cuda",
        "cluster.launch=ray",
        "cluster.gpus_per_node=2",
        "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
        "cluster.deterministic=false",
        recipe="quickstart_vllm",
    )
    records = run(config, tmp_path).records
    assert [record["run/version"] for record in records] == [1, 2, 3]
    assert all(record["weights/bytes"] > 0 and "gpu/used_after_sleep" not in record for record in records)
