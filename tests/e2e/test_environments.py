"""Episodes of several turns are played by the real engine and trained on: tools, and a class of the user's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem
from tandem.config.models import Tokenizer
from tandem.data.arithmetic import problem
from tandem.data.chat import Chat
from tandem.data.dialogue import Dialogue
from tandem.envs.episode import EpisodeRow
from tandem.launch.build import build_house, sampling_of
from tandem.launch.local import LocalMachinery
from tandem.launch.process import prepare
from tandem.rollout.groups import GroupRollOut
from tandem.types import Reply, Score
from tests.e2e.runs import run, short_config

QUICKSTART = Path(tandem.__file__).parent / "assets" / "quickstart"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
STEPS, ROWS = 180, 4
TOOLS = (
    "env={name: tools, tools: [calculator], tool_call_format: hermes, describe_tools: false,"
    " verifier: {name: format, pattern: 'The answer is -?[0-9]+[.]'}}"
)
ROOM = ("policy.max_total_sequence_length=256", "policy.generation.max_new_tokens=96")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a short lesson: first call the calculator, then say what it said."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    chat = Chat(tokenizer, Tokenizer())
    speech = Dialogue(chat, [chat.eos_token_id], "tool")
    call = (*chat.encode_text(CALL), chat.eos_token_id)
    said = (*chat.encode_text("The answer is 42."), chat.eos_token_id)
    heard = speech.follow(call, [Reply("tool", "42", "calculator")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        rows = []
        for row in range(ROWS):
            asked = chat.encode(problem(1, step * ROWS + row).question)
            ids = torch.tensor([*asked, *call, *heard, *said])
            own = torch.tensor([False] * len(asked) + [True] * len(call) + [False] * len(heard) + [True] * len(said))
            rows.append((ids, torch.where(own, ids, -100)))
        pad = torch.nn.utils.rnn.pad_sequence
        ids, labels = pad([r[0] for r in rows], True, 3), pad([r[1] for r in rows], True, -100)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("caller")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_policy_that_calls_tools_plays_and_learns(tmp_path: Path, caller: Path):
    config = short_config(f"policy.model_name={caller}", TOOLS, *ROOM, "ppo.max_num_steps=2")
    samples = asyncio.run(played(config))
    turns = [count_of_turns(sample.mask) for sample in samples]
    assert max(turns) >= 2
    answered = next(sample for sample, count in zip(samples, turns, strict=True) if count == 2)
    assert answered.text.startswith(CALL + "<|end|><|user|>42<|assistant|>")
    records = run(config, tmp_path).records
    assert [record["run/version"] for record in records] == [1, 2]
    assert all(record["actor/grad_norm"] > 0 for record in records)
    assert all(record["critic/grad_norm"] > 0 for record in records)
    # The engine's log-probs and the trainer's are of the same ids, holes included.
    assert records[0]["rollout/seq_mult_prob_error_max"] == pytest.approx(1.0, abs=1e-4)


def count_of_turns(mask: tuple[bool, ...]) -> int:
    return sum(now and not before for before, now in zip((False, *mask), mask, strict=False))


async def played(config):
    """The samples of a few prompts, as the run's own engine writes them; each group is the same when played again."""
    async with house_of(config) as house:
        assert house.train_set is not None
        prompts = [house.train_set.prompt(index) for index in range(2)]
        groups = [await roll_out(config, house, house.env).play(prompt, attempt=0) for prompt in prompts]
        again = [await roll_out(config, house, house.env).play(prompt, attempt=0) for prompt in prompts]
        assert groups == again, "an episode follows from the seed"
        return [sample for group in groups for sample in group]


@asynccontextmanager
async def house_of(config):
    prepare(config.cluster)
    machinery = LocalMachinery(config)
    house = await build_house(config, machinery)
    try:
        yield house
    finally:
        await house.env.close()
        await machinery.close()


def roll_out(config, house, env) -> GroupRollOut:
    return GroupRollOut(
        env=env,
        engine=house.engine,
        plane=house.plane,
        samples=4,
        sampling=sampling_of(config, house.chat, validation=False),
        timeout_s=60.0,
        need_spread=False,
    )


class Asks:
    """Asks for so many tokens, turn by turn, each behind the last."""

    def __init__(self, *limits: int) -> None:
        self._limits = limits

    async def play(self, prompt, write):
        row = EpisodeRow(prompt)
        for limit in self._limits:
            row.write(await write(row.tokens, max_new_tokens=limit))
        return row.sample(Score(0.0), "", truncated=False)

    async def close(self):
        """It holds nothing."""


def test_an_environment_may_ask_for_fewer_tokens_than_the_recipe_and_never_gets_more():
    config = short_config("policy.generation.max_new_tokens=4")

    async def lengths(*limits: int) -> list[int]:
        async with house_of(config) as house:
            assert house.train_set is not None
            prompt = house.train_set.prompt(0)
            samples = await roll_out(config, house, Asks(*limits)).play(prompt, attempt=0)
            return [len(sample.tokens) - len(prompt.tokens) for sample in samples]

    assert asyncio.run(lengths(3)) == [3] * 4
    assert asyncio.run(lengths(3, 1)) == [4] * 4
    assert asyncio.run(lengths(50)) == [4] * 4


def test_a_class_of_the_users_plays_and_rewards_are_learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "second_chance.py").write_text(
        "class Retry:\n"
        "    def __init__(self, worth):\n"
        "        self.worth = worth\n"
        "    def reset(self, question, answer):\n"
        "        self.answer, self.question = answer, question\n"
        "    async def step(self, response):\n"
        "        right = response.endswith(f' is {self.answer}.')\n"
        "        parts = {'right': self.worth * right, 'turns': -0.1}\n"
        "        return f'No. {self.question}', parts, right\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = "env={name: python, target: 'second_chance:Retry', arguments: {worth: 2.0}, max_turns: 2}"
    (record,) = run(
        short_config(env, "ppo.max_num_steps=1", "policy.max_total_sequence_length=192"), tmp_path / "run"
    ).records
    assert {"rollout/component/right", "rollout/component/turns"} <= set(record)
    assert -0.2 <= record["rollout/component/turns"] < -0.1, "some answered twice"
    assert record["actor/grad_norm"] > 0
