"""What every Trainer does, whatever library holds its model: `pytest tests/contracts -k megatron` runs it on one."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tandem.train.worker import Worker
from tandem.types import merge
from tests.contracts.trainer_kinds import (
    BATCH,
    COLUMNS,
    DIVISOR,
    KINDS,
    LENGTHS,
    ROLES,
    TrainerKind,
    farthest,
    trainer_of,
    weights_of,
)
from tests.train.small_models import SHAPE, llama, qwen

EXACT = 1e-6


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> TrainerKind:
    if importlib.util.find_spec(request.param.package) is None:
        pytest.skip(f"the {request.param.name} backend needs the extra {request.param.package}, not installed here")
    return request.param


def build(kind: TrainerKind, role: str, **changes: object):
    return kind.actor(**changes) if role == "actor" else kind.critic(**changes)


async def update(model: Worker, parts: Sequence[Sequence[int]] = (range(6),), divisor: float = DIVISOR):
    found = [await model.forward_backward(BATCH.pick(part), {}) for part in parts]
    return merge(*found, await model.optim_step(divisor))


def test_log_probs_are_those_of_transformers_where_the_policy_wrote(kind: TrainerKind):
    async def scene():
        model, plane = await trainer_of(kind.actor(), "actor")
        await model.infer(BATCH, "found")
        found = (await plane.get(BATCH.keys, ["found"]))["found"]
        plain = llama().eval()
        for tokens, mask, row in zip(COLUMNS["tokens"], COLUMNS["mask"], found, strict=True):
            with torch.no_grad():
                logprobs = (plain(input_ids=tokens[None]).logits[0] / 0.7).log_softmax(-1)
            own = torch.cat([torch.zeros(1), logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)])
            torch.testing.assert_close(row, torch.where(mask, own, 0.0), rtol=1e-5, atol=1e-5)
        await model.close()

    asyncio.run(scene())


def test_values_stand_before_their_token_and_after_the_last(kind: TrainerKind):
    async def scene():
        model, plane = await trainer_of(kind.critic(), "critic")
        await model.infer(BATCH, "found")
        columns = await plane.get(BATCH.keys, ["found", "found_after"])
        weight = weights_of(model)["value_head.linear.weight"]
        plain = llama().eval()
        for tokens, row, last in zip(COLUMNS["tokens"], columns["found"], columns["found_after"], strict=True):
            with torch.no_grad():
                after = (plain.model(input_ids=tokens[None]).last_hidden_state[0] @ weight.t()).squeeze(1)
            torch.testing.assert_close(row, torch.cat([torch.zeros(1), after[:-1]]), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(last, after[-1], rtol=1e-5, atol=1e-5)
        await model.close()

    asyncio.run(scene())


def test_a_new_critic_says_0_or_the_middle_of_its_bins(kind: TrainerKind):
    async def scene():
        for support, start in ((None, 0.0), ((-1.0, 3.0, 11), 1.0)):
            model, plane = await trainer_of(kind.critic(support, zero=True), "critic")
            await model.infer(BATCH, "found")
            for row in (await plane.get(BATCH.keys, ["found"]))["found"]:
                assert torch.allclose(row[1:], torch.tensor(start))
            await model.close()

    asyncio.run(scene())


WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def scaled(rope: dict[str, object]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))


@pytest.mark.parametrize(
    "model",
    [lambda: qwen(**WINDOW), lambda: scaled(LLAMA3), lambda: scaled(LINEAR)],
    ids=["window", "llama3-rope", "linear-rope"],
)
def test_windows_and_scaled_positions_are_kept(kind: TrainerKind, model: Callable[[], PreTrainedModel]):
    async def scene():
        trainer, plane = await trainer_of(kind.actor(model()), "actor")
        await trainer.infer(BATCH, "found")
        found = (await plane.get(BATCH.keys, ["found"]))["found"]
        with torch.no_grad():
            logprobs = (model().eval()(input_ids=COLUMNS["tokens"][0][None]).logits[0] / 0.7).log_softmax(-1)
        own = logprobs[:-1].gather(1, COLUMNS["tokens"][0][1:, None]).squeeze(1)
        mask = COLUMNS["mask"][0][1:]
        torch.testing.assert_close(found[0][1:][mask], own[mask], rtol=1e-5, atol=1e-5)
        await trainer.close()

    asyncio.run(scene())


@pytest.mark.parametrize("role", ROLES)
def test_any_cut_into_chunks_and_micro_batches_is_the_same_update(kind: TrainerKind, role: str):
    async def scene():
        found = []
        for parts, budget in (([range(6)], 256), ([range(6)], 1), ([[0, 1], [2], [3, 4, 5]], 64)):
            model, _ = await trainer_of(build(kind, role, optimizer={"lr": 1e-4}), role, budget)
            metrics = await update(model, parts)
            found.append((weights_of(model), metrics[f"{role}/grad_norm"].value))
            await model.close()
        return found

    (weights, norm), *others = asyncio.run(scene())
    for other, other_norm in others:
        assert farthest(other, weights) < EXACT
        assert other_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_the_divisor_divides_once(kind: TrainerKind, role: str):
    async def scene():
        norms = []
        for divisor in (DIVISOR, 2 * DIVISOR):
            model, _ = await trainer_of(build(kind, role), role)
            norms.append((await update(model, divisor=divisor))[f"{role}/grad_norm"].value)
            await model.close()
        return norms

    once, half = asyncio.run(scene())
    assert half == pytest.approx(once / 2, rel=1e-6)


def test_a_divisor_of_0_moves_nothing_and_one_that_is_not_finite_is_refused(kind: TrainerKind):
    async def scene():
        model, _ = await trainer_of(kind.actor(), "actor")
        before = weights_of(model)
        metrics = await update(model, divisor=0.0)
        assert farthest(weights_of(model), before) == 0
        assert metrics["actor/grad_norm"].value == 0
        with pytest.raises(ValueError, match="finite divisor"):
            await model.optim_step(math.inf)
        await model.close()

    asyncio.run(scene())


def test_a_gradient_is_clipped_to_its_norm(kind: TrainerKind):
    async def scene():
        found = []
        for scale in (1.0, 0.01):  # AdamW forgets a scale; eps as large as the gradient does not
            optimizer = {"lr": 1e-2, "eps": 1.0}
            model, _ = await trainer_of(kind.actor(max_grad_norm=1e-3, optimizer=optimizer), "actor")
            await update(model, divisor=DIVISOR * scale)
            found.append(weights_of(model))
            await model.close()
        return found

    unclipped, clipped = asyncio.run(scene())
    assert farthest(clipped, unclipped) < EXACT


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_refuses_the_step_and_the_next_is_whole(kind: TrainerKind, value: float):
    async def scene():
        model, plane = await trainer_of(kind.actor(max_skipped_optimizer_steps=1), "actor", budget=1)
        bad = [torch.where(mask, value, 0.0) for mask in COLUMNS["mask"][3:4]]
        await plane.put([3], {"advantages": bad})
        before = weights_of(model)
        assert (await update(model))["actor/steps_skipped"].value == 1
        assert farthest(weights_of(model), before) == 0
        good = [[0, 1, 2, 4, 5]]
        other, _ = await trainer_of(kind.actor(), "actor", budget=1)
        assert (await update(model, good))["actor/steps_skipped"].value == 0
        await update(other, good)
        assert farthest(weights_of(model), weights_of(other)) == 0
        with pytest.raises(RuntimeError, match=r"max_skipped_optimizer_steps allows; the last one held samples \[3\]"):
            await update(model)
        await model.close()
        await other.close()

    asyncio.run(scene())


def test_the_schedule_ticks_once_an_optimizer_step(kind: TrainerKind):
    async def scene():
        model, _ = await trainer_of(kind.actor(scheduler={"name": "linear", "warmup_steps": 2}), "actor")
        rates = [(await update(model, [[0, 1], [2, 3]]))["actor/lr"].value for _ in range(4)]
        await model.close()
        return rates

    assert asyncio.run(scene()) == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2 * (1 - 1 / 7)])


def test_norms_and_biases_do_not_decay(kind: TrainerKind):
    async def scene():
        model, _ = await trainer_of(
            kind.actor(qwen(), optimizer={"lr": 1e-2, "weight_decay": 50.0, "eps": 1e9}), "actor"
        )
        before = weights_of(model)  # so large an eps leaves nothing but decay
        await update(model)
        after = weights_of(model)
        await model.close()
        return before, after

    before, after = asyncio.run(scene())
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor * (0.5 if tensor.dim() > 1 else 1.0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_exported_weights_are_the_models_by_name_tied_ones_once(kind: TrainerKind, tied: bool):
    wanted = {name: parameter.detach() for name, parameter in llama(tied=tied).named_parameters()}
    assert ("lm_head.weight" in wanted) != tied
    found = weights_of(kind.actor(llama(tied=tied)))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_critic_exports_its_head_in_place_of_the_output_layer(kind: TrainerKind):
    found = weights_of(kind.critic())
    assert found.keys() == {n for n, _ in llama().named_parameters()} | {"value_head.linear.weight"}
    assert found["value_head.linear.weight"].shape == (1, SHAPE["hidden_size"])


@pytest.mark.parametrize("role", ROLES)
def test_save_and_load_continue_to_the_bit(kind: TrainerKind, role: str, tmp_path: Path):
    schedule = {"scheduler": {"name": "cosine", "warmup_steps": 1}}

    async def scene():
        model, _ = await trainer_of(build(kind, role, **schedule), role)
        await update(model)
        await update(model)
        write = await model.snapshot(copy=True)
        wanted = [await update(model), await update(model)]
        write(tmp_path)  # later: training has gone on, and the snapshot has not
        other, _ = await trainer_of(build(kind, role, **schedule), role)
        await other.load(tmp_path)
        assert [await update(other), await update(other)] == wanted
        assert farthest(weights_of(other), weights_of(model)) == 0
        fresh, _ = await trainer_of(build(kind, role, **schedule), role)
        await fresh.load_weights(tmp_path)
        assert (await update(fresh))[f"{role}/lr"].value == pytest.approx(5e-3)  # the schedule begins anew
        for each in (model, other, fresh):
            await each.close()

    asyncio.run(scene())
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_a_snapshot_before_the_first_step_can_be_loaded(kind: TrainerKind, tmp_path: Path):
    async def scene():
        model, other = [(await trainer_of(kind.actor(), "actor"))[0] for _ in range(2)]
        (await model.snapshot(copy=False))(tmp_path)
        await update(other)
        await other.load(tmp_path)
        assert await update(other) == await update(model)
        await model.close()
        await other.close()

    asyncio.run(scene())


def test_another_architecture_is_refused_with_the_first_tensor_that_differs(kind: TrainerKind, tmp_path: Path):
    kind.actor().snapshot(copy=False)(tmp_path)
    with pytest.raises(ValueError, match=r"q_proj.bias is missing there"):
        kind.actor(qwen()).load(tmp_path)
    with pytest.raises(ValueError, match=r"value_head.linear.weight is missing there"):
        kind.critic().load(tmp_path)
    wider = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"intermediate_size": 128}), tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"gate_proj.weight is \[128, 64\] here and \[96, 64\] there"):
        kind.actor(wider).load(tmp_path)


def test_a_frozen_model_infers_and_refuses_to_step(kind: TrainerKind):
    async def scene():
        model, plane = await trainer_of(kind.actor(steps=None), "actor")
        await model.infer(BATCH, "found")
        assert all(row.any() for row in (await plane.get(BATCH.keys, ["found"]))["found"])
        with pytest.raises(RuntimeError, match="frozen"):
            await model.optim_step(1.0)
        await model.close()

    asyncio.run(scene())


def test_activation_checkpointing_changes_no_weight(kind: TrainerKind):
    async def scene():
        found = []
        for checkpointing in ("none", "full"):
            model, _ = await trainer_of(kind.actor(activation_checkpointing=checkpointing), "actor")
            await update(model)
            found.append(weights_of(model))
            await model.close()
        return found

    plain, checkpointed = asyncio.run(scene())
    assert farthest(checkpointed, plain) == 0


@pytest.mark.parametrize("role", ROLES)
def test_bfloat16_learns_exports_bfloat16_and_saves_float32_that_it_would_round(
    kind: TrainerKind, role: str, tmp_path: Path
):
    from tandem.train.files import SavedTensors

    async def scene():
        options = {"precision": "bfloat16", "optimizer": {"lr": 1e-3}}
        model, _ = await trainer_of(build(kind, role, **options), role)
        losses = [(await update(model))[f"{role}/loss"].value for _ in range(4)]
        assert losses[-1] < losses[0]
        assert {tensor.dtype for tensor in weights_of(model).values()} == {torch.bfloat16}
        (await model.snapshot(copy=False))(tmp_path)
        saved = SavedTensors(tmp_path, "model")
        name = "model.layers.0.self_attn.k_proj.weight"
        assert not torch.equal(saved.read(name), saved.read(name).bfloat16().float())
        other, _ = await trainer_of(build(kind, role, **options), role)
        await other.load(tmp_path)
        assert await update(other) == await update(model)
        await model.close()
        await other.close()

    asyncio.run(scene())


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("role", ROLES)
def test_a_model_that_leaves_its_device_in_turn_learns_and_saves_the_same(
    kind: TrainerKind, role: str, offload: str, tmp_path: Path
):
    async def rest(model: Worker, parked: bool) -> None:
        if parked:
            await model.park()

    async def scene():
        found = []
        for parked in (False, True):
            options = {"offload": offload} if parked else {}
            model, plane = await trainer_of(build(kind, role, precision="bfloat16", **options), role)
            for number in range(2):
                await model.forward_backward(BATCH, {})
                await rest(model, parked)
                await model.optim_step(DIVISOR)
                await rest(model, parked)
                await model.infer(BATCH, f"found-{number}")
            await rest(model, parked)
            (await model.snapshot(copy=False))(tmp_path / str(parked))
            columns = await plane.get(BATCH.keys, ["found-0", "found-1"])
            found.append((weights_of(model), [row for column in columns.values() for row in column]))
            await model.close()
        return found

    (weights, rows), (parked_weights, parked_rows) = asyncio.run(scene())
    assert farthest(parked_weights, weights) == 0
    assert all(map(torch.equal, rows, parked_rows))
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (tmp_path / "True" / file).read_bytes() == (tmp_path / "False" / file).read_bytes()


def test_work_is_counted_from_true_lengths(kind: TrainerKind):
    async def scene():
        model, _ = await trainer_of(kind.actor(), "actor")
        metrics = await model.infer(BATCH, "found")
        await model.close()
        return metrics

    metrics = asyncio.run(scene())
    assert metrics["actor/tokens"].value == sum(LENGTHS)
    assert metrics["actor/tflops"].value > 0
