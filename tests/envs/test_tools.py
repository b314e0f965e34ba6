"""Episodes with tools: whose ids are whose, what a tool's failure becomes, and every limit."""

import asyncio
import json
import random
import threading
from collections.abc import Callable

import pytest
import torch

from tandem.algorithms.gae import gae, place_last
from tandem.envs.episode import NO_VERSION
from tandem.envs.tool_calls import Call, Malformed
from tandem.envs.tools import MOST_HUNG, Tool, Toolbox, load_tool, load_tools
from tandem.types import RolloutFailed
from tests.envs.talking import HERMES, LLAMA3, MISTRAL, LastWord, Says, chat_of, pieces, play, tools_config

GATE = threading.Event()
MEETING = threading.Barrier(2)


@pytest.fixture(autouse=True)
def _gate():
    """Tools that hang end with the test."""
    GATE.clear()
    yield
    GATE.set()


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: the number
    """
    return 2 * number


async def later(text: str = "nothing") -> dict:
    """Say it again, later.

    Args:
        text: what to say
    """
    await asyncio.sleep(0)
    return {"said": text}


def broken() -> str:
    """Never works."""
    raise KeyError("no such place")


def hangs() -> str:
    """Never returns."""
    GATE.wait()
    return "too late"


async def sleeps() -> str:
    """Never returns either."""
    await asyncio.Event().wait()
    return "too late"


def meets() -> str:
    """Waits for another call."""
    return f"met as {MEETING.wait(20) * 0}"


def gives_up() -> str:
    """Ends the rollout."""
    raise RolloutFailed("the index is down", "infrastructure")


def tool(function: Callable):
    return load_tool(f"{__name__}:{function.__name__}")


@pytest.fixture
def tools():
    return [load_tool("calculator"), *map(tool, [double, later, broken, hangs, sleeps, gives_up, meets])]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turns(chat, *texts: str):
    return [(*chat.encode_text(text), chat.eos_token_id) for text in texts]


def told(sample, chat) -> str:
    """What the policy read between its first and its second turn."""
    return chat.verbatim(pieces(sample)[2][1])


def test_the_policys_ids_are_what_the_engine_wrote_and_all_others_are_holes(tools):
    chat, judge = chat_of(HERMES), LastWord()
    engine = Says(turns(chat, f"Let me see. {call('calculator', expression='2+3')}", "5"))
    sample = play(chat, engine, tools, verifier=judge)
    first, second = engine.written
    prompt, one, result, two = pieces(sample)
    assert prompt == (False, engine.asked[0])
    assert (one, two) == ((True, first.tokens), (True, second.tokens))
    assert result[0] is False
    wanted = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert chat.verbatim(result[1]) == wanted
    assert engine.asked[1] == sample.tokens[: len(engine.asked[1])]
    given, seen = len(prompt[1]), len(result[1])
    assert sample.logprobs == (0.0,) * given + first.logprobs + (0.0,) * seen + second.logprobs
    assert sample.versions == (NO_VERSION,) * given + first.versions + (NO_VERSION,) * seen + second.versions
    assert (sample.score.reward, sample.truncated, judge.read) == (1.0, False, ["5"])
    assert "<tool_response>\n5\n" in sample.text


@pytest.mark.parametrize("template", [HERMES, LLAMA3, MISTRAL, None])
def test_whatever_ids_a_policy_writes_they_are_never_encoded_again(tools, template):
    chat, draw = chat_of(template), random.Random(7)
    size = max(chat.encode_text("<|end|><|im_end|>[TOOL_CALLS]</s>")) + 1
    convention = {LLAMA3: "llama3_json", MISTRAL: "mistral"}.get(template, "hermes")
    body = {"name": "calculator", "arguments": {"expression": "1+1"}, "parameters": {"expression": "1+1"}}
    says = {"hermes": f"<tool_call>{json.dumps(body)}</tool_call>", "mistral": f"[TOOL_CALLS] [{json.dumps(body)}]"}
    for _ in range(25):
        noise = [tuple(draw.randrange(size) for _ in range(draw.randrange(1, 30))) for _ in range(3)]
        noise = [tuple(token for token in ids if token != chat.eos_token_id) for ids in noise]
        asks = chat.encode_text(says.get(convention, json.dumps(body)))
        front = () if convention == "llama3_json" else noise[0]
        engine = Says([(*front, *asks, chat.eos_token_id), (*noise[1], 9, chat.eos_token_id), noise[2]])
        sample = play(chat, engine, tools, convention=convention)
        wrote = [token for token, own in zip(sample.tokens, sample.mask, strict=True) if own]
        assert wrote == [token for written in engine.written for token in written.tokens]
        assert len(engine.written) >= 1
        for asked in engine.asked:
            assert sample.tokens[: len(asked)] == asked


def test_calls_of_one_turn_are_answered_in_order(tools):
    chat = chat_of(HERMES)
    both = call("double", number=4) + call("later", text="hi") + call("calculator", expression="1/4")
    sample = play(chat, Says(turns(chat, both, "5")), tools)
    assert told(sample, chat).count("<|im_start|>user") == 1
    first, second, third = told(sample, chat).split("<tool_response>\n")[1:]
    assert first.startswith("8\n")
    assert second.startswith('{"said": "hi"}\n')
    assert third.startswith("0.25\n")


def test_calls_of_one_turn_run_side_by_side(tools):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call("meets") * 2, "5")), tools, tool_timeout_s=20.0)
    assert told(sample, chat).count("met as 0") == 2


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (call("broken"), "error: KeyError: 'no such place'"),
        (call("calculator", expression="1/0"), "error: ZeroDivisionError: division by zero"),
        (call("double", number="many"), "error: argument number: Input should be a valid integer"),
        (call("double"), "error: argument number: Missing required argument"),
        (call("double", number=1, base=3), "error: argument base: Unexpected keyword argument"),
        (call("search", text="x"), "error: there is no tool 'search'; there are: calculator, double"),
        ("<tool_call>{'name': 'double'}</tool_call>", "error: a call is no JSON"),
        ('<tool_call>{"name": "double"}', "error: a <tool_call> has no </tool_call>"),
        ("<tool_call>" + "[" * 9000 + "</tool_call>", "error: a call is nested too deeply"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_policy(tools, said, heard):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, said, "5")), tools, max_tokens=100_000)
    assert heard in told(sample, chat)
    assert sample.score.reward == 1.0


@pytest.mark.parametrize("name", ["hangs", "sleeps"])
def test_a_tool_that_hangs_is_cut_by_its_deadline_and_the_episode_goes_on(tools, name):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call(name) + call("double", number=1), "5")), tools, tool_timeout_s=1.0)
    assert f"error: TimeoutError: {name} took longer than 1 s" in told(sample, chat)
    assert "<tool_response>\n2\n" in told(sample, chat)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")


def test_an_async_tool_past_its_deadline_is_ended():
    ended = threading.Event()

    async def waits() -> str:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    box = Toolbox([_made(waits)], tools_config(tool_timeout_s=0.05))
    (reply,) = asyncio.run(box.answer([Call("waits", {})]))
    assert "took longer" in reply.content
    assert ended.wait(20)


def _made(function):
    return Tool(function.__name__, {}, function)


def test_threads_that_hang_do_not_pile_up_without_end():
    box = Toolbox([_made(hangs)], tools_config(tool_timeout_s=0.001, max_calls_per_turn=MOST_HUNG))

    async def fill():
        await box.answer([Call("hangs", {})] * MOST_HUNG)
        await box.answer([Call("hangs", {})])

    with pytest.raises(RolloutFailed, match="still at work") as failed:
        asyncio.run(fill())
    assert failed.value.kind == "infrastructure"


def test_a_tool_may_fail_the_rollout_by_name(tools):
    chat = chat_of(HERMES)
    with pytest.raises(RolloutFailed, match="the index is down") as failed:
        play(chat, Says(turns(chat, call("gives_up"), "5")), tools)
    assert failed.value.kind == "infrastructure"


def test_more_calls_than_a_turn_may_have_are_not_made(tools):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call("double", number=1) * 3, "5")), tools, max_calls_per_turn=2)
    assert told(sample, chat).count("<tool_response>\n2\n") == 2
    assert "error: not called, a turn may call 2 times" in told(sample, chat)


def test_a_long_result_is_cut(tools):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call("later", text="x" * 100), "5")), tools, max_result_chars=20)
    assert '{"said": "xxxxxxxxxx... (92 characters were cut off)' in told(sample, chat)


def test_an_episode_that_runs_out_of_turns_is_truncated_and_scored(tools):
    chat, judge = chat_of(HERMES), LastWord()
    engine = Says(turns(chat, *[call("double", number=1)] * 5))
    sample = play(chat, engine, tools, verifier=judge, max_turns=3)
    assert len(engine.written) == 3
    assert sample.truncated
    assert sample.mask[-1], "what nobody will read is not in the row"
    assert judge.read == [call("double", number=1)]


def test_an_episode_that_runs_out_of_tokens_is_truncated_within_the_budget(tools):
    chat = chat_of(HERMES)
    texts = [call("later", text="a long result that fills the row"), "5"]
    whole = play(chat, Says(turns(chat, *texts)), tools)
    for budget in range(len(pieces(whole)[0][1]) + 1, len(whole.tokens) + 1):
        engine = Says(turns(chat, *texts))
        sample = play(chat, engine, tools, max_tokens=budget)
        assert len(sample.tokens) <= budget
        assert sample.tokens == whole.tokens[: len(sample.tokens)]
        assert sample.mask[-1]
        assert sample.truncated == (budget < len(whole.tokens))
        assert engine.limits == [budget - len(asked) for asked in engine.asked]


def test_an_engine_that_cuts_a_turn_ends_the_episode_without_calling(tools):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call("gives_up"), "5"), cut=[0]), tools)
    assert sample.truncated
    assert len(pieces(sample)) == 2


def test_an_episode_that_is_cancelled_ends_at_once_and_its_async_tools_with_it():
    started, ended = threading.Event(), threading.Event()

    async def waits() -> str:
        """Waits."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def run():
        box = Toolbox([_made(waits)], tools_config())
        task = asyncio.ensure_future(box.answer([Call("waits", {})]))
        await asyncio.to_thread(started.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ended.wait(20)


def test_advantages_do_not_depend_on_what_a_tool_said(tools):
    chat = chat_of(HERMES)
    engine = Says(turns(chat, call("double", number=3), "5"))
    sample = play(chat, engine, tools)
    mask = torch.tensor([sample.mask])
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    settings = {"gamma": 0.9, "lambda_value": 0.8, "lambda_policy": 0.7}
    with_holes = gae(place_last(torch.tensor([1.0]), mask), values, mask, **settings)
    own = mask[0]
    dense = torch.ones(1, int(own.sum()), dtype=torch.bool)
    without = gae(place_last(torch.tensor([1.0]), dense), values[:, own], dense, **settings)
    assert torch.equal(with_holes.advantages_NT[:, own], without.advantages_NT)
    assert torch.equal(with_holes.returns_NT[:, own], without.returns_NT)
    assert not with_holes.advantages_NT[:, ~own].any()


def test_results_may_be_said_as_a_user(tools):
    chat = chat_of(HERMES)
    sample = play(chat, Says(turns(chat, call("double", number=3), "5")), tools, result_role="user")
    assert told(sample, chat) == "\n<|im_start|>user\n6<|im_end|>\n<|im_start|>assistant\n"


def no_types(a):
    """Does.

    Args:
        a: something
    """
    return a


def no_words(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["abacus"], "neither built in (calculator) nor written module:name"),
        (["calculator", "calculator"], "two tools that are called 'calculator'"),
        (["tandem.no:tool"], "cannot be imported"),
        (["math:pi"], "is a float, not a function"),
        ([f"{__name__}:no_types"], "no description can be made of it"),
        ([f"{__name__}:no_words"], "no description can be made of it"),
    ],
)
def test_tools_that_cannot_be_are_refused_before_the_run(tools, targets, wanted):
    with pytest.raises(ValueError, match=r"env\.tools") as error:
        load_tools(tools_config(tools=tuple(targets)))
    assert wanted in str(error.value)


def test_a_malformed_call_beside_a_good_one_spoils_only_itself():
    box = Toolbox([_made(lambda: "fine")], tools_config())
    box_replies = asyncio.run(box.answer([Malformed("no JSON"), Call("<lambda>", {})]))
    assert [reply.content for reply in box_replies] == ["error: no JSON", "fine"]
