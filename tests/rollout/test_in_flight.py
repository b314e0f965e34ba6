"""Weights that change under a decode batch, step by step: no bit depends on the company; shared prompts stay exact."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import PreTrainedModel

from tandem.rollout.attention import install_attention
from tandem.rollout.decoding import DecodeBatch
from tandem.rollout.rows import Row
from tandem.types import RolloutFailed, Sampling
from tests.rollout.test_batch_invariance import requests
from tests.rollout.tiny_models import ARCHITECTURES, tiny_model

SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, seed=7, stop_token_ids=())
PROMPT = tuple(range(1, 40))


@dataclass(eq=False)
class Stage:
    """A batch over one model, whose weights become those of `seed = version`."""

    architecture: str
    max_rows: int
    version: int = 0
    shapes: list[tuple[int, int]] = field(default_factory=list)  # [rows, tokens] of every forward pass

    def __post_init__(self) -> None:
        self.model = tiny_model(self.architecture)
        install_attention(self.model)
        self.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: self.shapes.append(tuple(inputs[0].shape))
        )
        self.batch = DecodeBatch(self.model, max_rows=self.max_rows, max_length=256, pad_token_id=0)

    def update(self, version: int, *, recompute_kv: bool) -> None:
        self.batch.load_weights(tiny_model(self.architecture, seed=version).named_parameters())
        for row in self.batch:
            row.sign(self.version)
        self.version = version
        if recompute_kv:
            self.batch.recompute()

    def prefills(self) -> list[tuple[int, int]]:
        return [shape for shape in self.shapes if shape[1] > 1]


Mark = tuple[int, int, bool]  # an update: tokens the row had then, the version, recompute_kv


def crowd(stage: Stage, rows: list[Row], dice: random.Random) -> tuple[dict[Row, int], dict[Row, list[Mark]]]:
    """Write all rows, with arrivals, updates and departures at random. The version each came under, and its updates."""
    waiting, came, marks = list(rows), {}, {row: [] for row in rows}
    while waiting or len(stage.batch):
        if waiting and stage.batch.free and dice.random() < 0.3:
            count = min(stage.batch.free, dice.randint(1, 6), len(waiting))
            admitted, waiting = waiting[:count], waiting[count:]
            came |= dict.fromkeys(admitted, stage.version)
            stage.batch.admit(admitted)
        if dice.random() < 0.15:
            version, recompute_kv = stage.version + 1, dice.random() < 0.5
            for row in stage.batch:
                marks[row].append((len(row.tokens), version, recompute_kv))
            stage.update(version, recompute_kv=recompute_kv)
        if dice.random() < 0.05 and len(stage.batch):
            row = dice.choice(list(stage.batch))
            stage.batch.remove(row)
            del marks[row]
        if len(stage.batch):
            stage.batch.step()
    return came, marks


def alone(architecture: str, row: Row, came: int, marks: list[Mark]) -> Row:
    """The same row with the same updates at the same tokens, in a batch of its own."""
    stage = Stage(architecture, max_rows=1)
    stage.update(came, recompute_kv=False)
    copy = Row(row.prompt, row.sampling)
    stage.batch.admit([copy])
    for tokens, version, recompute_kv in marks:
        while len(copy.tokens) < tokens:
            stage.batch.step()
        stage.update(version, recompute_kv=recompute_kv)
    while len(stage.batch):
        stage.batch.step()
    return copy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_company_and_updates_change_no_bit(architecture: str):
    stage = Stage(architecture, max_rows=20)
    rows = [Row(tuple(tokens), law) for tokens, law in requests(seed=5, count=40)]
    came, marks = crowd(stage, rows, random.Random(architecture))
    assert sum(len(updates) > 0 for updates in marks.values()) > 10
    for row, updates in marks.items():
        copy = alone(architecture, row, came[row], updates)
        assert (row.tokens, row.logprobs, row.versions) == (copy.tokens, copy.logprobs, copy.versions)


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_late_sample_never_copies_a_prompt_cached_under_other_weights(recompute_kv: bool):
    stage = Stage("llama", max_rows=4)
    stage.batch.admit([Row(PROMPT, SAMPLED)])
    stage.batch.step()
    stage.batch.step()
    stage.update(1, recompute_kv=recompute_kv)
    late = [Row(PROMPT, replace(SAMPLED, seed=seed)) for seed in (1, 2)]
    for row in late:
        stage.batch.admit([row])
        stage.batch.step()
    recomputed = [(1, 48)] if recompute_kv else []
    assert stage.prefills() == [(1, 48), *recomputed, (1, 48)], "once for both late samples"
    fresh = alone("llama", late[0], 1, [])
    while len(stage.batch):
        stage.batch.step()
    assert (late[0].tokens, late[0].logprobs) == (fresh.tokens, fresh.logprobs)


def test_recomputing_reads_equal_texts_once_and_lets_new_prompts_of_that_text_copy_it():
    stage = Stage("llama", max_rows=8)
    greedy = replace(SAMPLED, temperature=0.0)
    rows = [Row(PROMPT, greedy), Row(PROMPT, replace(greedy, seed=8)), Row(PROMPT, SAMPLED)]
    stage.batch.admit(rows)
    for _ in range(3):
        stage.batch.step()
    stage.update(1, recompute_kv=True)
    assert stage.prefills() == [(1, 48), (2, 48)]
    late = Row((*PROMPT, *rows[0].tokens), replace(greedy, max_new_tokens=9))
    stage.batch.admit([late])
    assert stage.prefills() == [(1, 48), (2, 48)]
    while len(stage.batch):
        stage.batch.step()
    assert (late.tokens, late.logprobs) == (rows[0].tokens[3:], rows[0].logprobs[3:])


def test_a_removed_row_leaves_no_nan_behind():
    """Weights that are not finite may be recomputed with, and the request cancelled before a step finds out."""
    stage = Stage("llama", max_rows=1)
    row = Row(PROMPT, SAMPLED)
    stage.batch.admit([row])
    stage.batch.step()
    poison(stage.model)
    stage.batch.recompute()
    stage.batch.remove(row)
    stage.update(1, recompute_kv=True)
    following = Row(PROMPT[:5], SAMPLED)
    stage.batch.admit([following])
    while len(stage.batch):
        assert all(not isinstance(outcome, RolloutFailed) for _, outcome in stage.batch.step())
    fresh = alone("llama", following, 1, [])
    assert (following.tokens, following.logprobs) == (fresh.tokens, fresh.logprobs)


def test_recomputing_an_empty_batch_or_a_prompt_of_one_token_is_fine():
    stage = Stage("llama", max_rows=2)
    stage.batch.recompute()
    row = Row((5,), SAMPLED)
    stage.batch.admit([row])
    stage.update(1, recompute_kv=True)
    while len(stage.batch):
        stage.batch.step()
    fresh = alone("llama", row, 1, [])
    assert (row.tokens, row.logprobs) == (fresh.tokens, fresh.logprobs)


def poison(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
