"""What every verifier promises, whatever it reads: right is more than wrong, company changes nothing, close ends it."""

import asyncio

import pytest

from tandem.envs.verifiers import build_verifier, check_answers
from tandem.types import Prompt
from tests.envs.asking import landlock_is_here, verifier_config

CODE = "```python\ndef f(x): return {}\n```"
# kind: options, reference answer, a right response, a wrong one
KINDS = {
    "arithmetic": ({}, "13", "The answer is 13.", "The answer is 12."),
    "gsm8k": ({}, "13", "#### 13", "#### 12"),
    "dapo_math": ({}, "13", "Answer: 13", "Answer: 12"),
    "math_verify": ({"timeout_s": 30.0}, r"\frac{1}{2}", r"\boxed{0.5}", r"\boxed{0.6}"),
    "exact": ({}, "13", "13", "12"),
    "regex": ({"pattern": "<(.*)>"}, "13", "<13>", "<12>"),
    "format": ({"pattern": "<.*>"}, "", "<13>", "13"),
    "length": ({"max_chars": 3}, "", "13", "thirteen"),
    "python": ({"target": "contract_rewards:score"}, "13", "13", "12"),
    "code": ({"timeout_s": 60.0}, "assert f(1) == 2", CODE.format("x + 1"), CODE.format("x")),
    "weighted_sum": ({"components": {"right": {"verifier": {"name": "gsm8k"}}}}, "13", "#### 13", "#### 12"),
}


@pytest.fixture(params=sorted(KINDS))
def kind(request, tmp_path, monkeypatch):
    """A section, and the reference answer with a right and a wrong response."""
    options, answer, right, wrong = KINDS[request.param]
    if request.param == "code" and not landlock_is_here():
        pytest.skip("the sandbox needs Linux with Landlock")
    if request.param == "python":
        (tmp_path / "contract_rewards.py").write_text("def score(q, a, r): return float(a == r)")
        monkeypatch.syspath_prepend(str(tmp_path))
    return verifier_config(name=request.param, **options), answer, right, wrong


def test_right_is_more_than_wrong_alone_and_in_company_and_close_ends_it(kind):
    config, answer, right, wrong = kind
    check_answers(config, [("row:7", answer)])

    async def scores():
        verifier = build_verifier(config)

        async def reward(response):
            return (await verifier.score(Prompt(0, "row:7", "How many?", answer, (1,)), response)).reward

        alone = [await reward(right), await reward(wrong)]
        company = await asyncio.gather(*(reward(response) for response in (right, wrong) * 3))
        await verifier.close()
        await verifier.close()
        return alone, company

    alone, company = asyncio.run(scores())
    assert alone == [1.0, 0.0]
    assert company == alone * 3
