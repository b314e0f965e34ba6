"""The knobs of an environment: how an episode goes, and how a response is scored, by which verifier."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, NotNegative, Positive
from tandem.config.data import NAME
from tandem.config.section import Section

ToolCallFormat = Literal["hermes", "llama3_json", "mistral"]
NonEmpty = Annotated[str, Field(min_length=1)]


class ArithmeticVerifier(Section):
    """1 if the number after the last `The answer is` is right."""

    name: Literal["arithmetic"]


class Gsm8kVerifier(Section):
    """1 if the number after the last `####` or `The answer is` is right; commas, signs and currency normalised."""

    name: Literal["gsm8k"]


class DapoMathVerifier(Section):
    """1 if the last `Answer:` line holds the reference answer: the reward of DAPO (arXiv:2503.14476)."""

    name: Literal["dapo_math"]


class MathVerifyVerifier(Section):
    """1 if the library math-verify finds the response's final expression equal to the reference answer."""

    name: Literal["math_verify"]
    num_workers: Count = 2  # processes that compare
    timeout_s: Positive = 5.0  # for one response; then its worker is ended and another started
    memory_bytes: Annotated[int, Field(ge=1 << 29)] = 2 << 30  # address space of a worker
    on_timeout: Literal["wrong", "drop"] = "wrong"  # a response past a limit: reward 0, or the rollout fails


class ExactVerifier(Section):
    """1 if the whole response is the reference answer; space around it and between words does not count."""

    name: Literal["exact"]
    ignore_case: bool = False


class RegexVerifier(Section):
    """1 if what the pattern finds in the response is the reference answer. The last match counts, its first group."""

    name: Literal["regex"]
    pattern: Annotated[NonEmpty, Field(examples=["'Answer: *(\\w+)'"])]
    ignore_case: bool = False
    timeout_s: Positive = 5.0  # for one response; a pattern that takes longer fails the rollout


class FormatReward(Section):
    """1 if the whole response has the form of the pattern. A dot matches every character, a new line too."""

    name: Literal["format"]
    pattern: Annotated[NonEmpty, Field(examples=["'<think>.*</think>.*'"])]
    timeout_s: Positive = 5.0  # as of regex


class LengthReward(Section):
    """1 while the response has min_chars to max_chars characters; beyond, falling to 0 over falloff_chars."""

    name: Literal["length"]
    min_chars: Annotated[int, Field(ge=0)] = 0
    max_chars: Count
    falloff_chars: Annotated[int, Field(ge=0)] = 0  # 0: at once


class PythonVerifier(Section):
    """Your own function, `module:name`: (question, answer, response) -> a number, or {component: number}."""

    name: Literal["python"]
    target: Annotated[str, Field(examples=["my_rewards:score"])]
    batch_size: Count | None = None  # given: the function takes three lists of up to so many, and returns a list


class RewardModelVerifier(Section):
    """The score of a sequence-classification model, which reads question and response by its own chat template."""

    name: Literal["reward_model"]
    model_name: Annotated[NonEmpty, Field(examples=["path/to/reward-model"])]
    tokenizer: NonEmpty | None = None  # None: the model's own
    chat_template: NonEmpty | None = None  # a Jinja file; None: the tokenizer's own
    system_prompt: str | None = None
    label: Annotated[int, Field(ge=0)] = 0  # which of the model's outputs is the reward
    output: Literal["logit", "probability"] = "logit"
    max_length: Count = 4096  # tokens; a longer chat fails the rollout
    batch_size: Count = 8  # chats in one pass; 1: a score never depends on what else was scored
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: the first GPU, where there is one
    precision: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False


class LlmJudgeVerifier(Section):
    """A score that a language model behind an OpenAI-compatible endpoint writes."""

    name: Literal["llm_judge"]
    base_url: Annotated[str, Field(examples=["http://127.0.0.1:8000/v1"])]
    model: Annotated[NonEmpty, Field(examples=["my-judge"])]
    api_key_env: NonEmpty | None = None  # the environment variable that holds the key
    prompt: str = (
        "Grade the response to a question.\n\nQuestion:\n{question}\n\nReference answer:\n{answer}\n\n"
        "Response:\n{response}\n\nThink briefly. Then end with one line: Score: a number from 0 (wrong) to 10 (right)."
    )
    score_pattern: NonEmpty = r"(?i)score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)"  # its last match counts, its first group
    min_score: float = 0.0
    max_score: float = 10.0  # mapped to 0..1
    temperature: NotNegative = 0.0
    max_tokens: Count = 512
    request_timeout_s: Positive = 15.0
    max_retries: Annotated[int, Field(ge=0)] = 2  # after a time-out, a refused connection, a 408, 429 or 5xx
    retry_backoff_s: NotNegative = 1.0  # doubles with each
    max_concurrency: Count = 32  # requests in flight
    on_error: Literal["drop", "fail"] = "drop"  # drop: the rollout fails and is counted; fail: the run ends


class CodeVerifier(Section):
    """Whether the response's last block of Python passes the tests of the reference answer, run in a sandbox."""

    name: Literal["code"]
    tests: Literal["asserts", "stdio"] = "asserts"  # of the answer: Python, or JSON [{"input": ..., "output": ...}]
    reward: Literal["all", "fraction"] = "all"  # 1 if every test passes, or the share that does
    num_workers: Count = 2  # programs at one time
    timeout_s: Positive = 10.0  # wall clock of one program
    cpu_s: Count = 5
    memory_bytes: Annotated[int, Field(ge=1 << 26)] = 512 << 20
    file_bytes: Count = 1 << 20  # of one file that it writes
    output_bytes: Count = 1 << 20  # of what it prints; past it the program is ended


class ReasoningGymVerifier(Section):
    """The scorer of the problem's own task in the library reasoning-gym. Needs the extra `reasoning-gym`."""

    name: Literal["reasoning_gym"]
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z_]+$")] = "answer"  # <answer>...</answer>, the last one counts
    num_workers: Count = 2  # processes that score
    timeout_s: Positive = 10.0  # for one response; then its worker is ended and another started
    memory_bytes: Annotated[int, Field(ge=1 << 28)] = 2 << 30  # address space of a worker


Single = (
    ArithmeticVerifier
    | Gsm8kVerifier
    | DapoMathVerifier
    | MathVerifyVerifier
    | ExactVerifier
    | RegexVerifier
    | FormatReward
    | LengthReward
    | PythonVerifier
    | RewardModelVerifier
    | LlmJudgeVerifier
    | CodeVerifier
    | ReasoningGymVerifier
)


class Component(Section):
    """One named part of a reward."""

    verifier: Annotated[Single, Field(discriminator="name")]
    weight: float = 1.0


class WeightedSum(Section):
    """The sum of named parts, each times its weight. Each part is logged, and `gdpo` learns from them one by one."""

    name: Literal["weighted_sum"]
    components: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Component],
        Field(min_length=1, examples=["{right: {verifier: {name: gsm8k}}}"]),
    ]


Verifier = Annotated[Single | WeightedSum, Field(discriminator="name")]


class SingleTurnEnv(Section):
    """One question, one response, one score."""

    name: Literal["single_turn"] = "single_turn"
    verifier: Verifier
    score_timeout_s: Positive = 60.0


class ToolsEnv(Section):
    """Several turns: the policy calls Python functions and reads what they return; its last turn is scored."""

    name: Literal["tools"]
    verifier: Verifier
    score_timeout_s: Positive = 60.0
    # Functions, `module:name`, or the built-in `calculator`.
    tools: Annotated[tuple[NonEmpty, ...], Field(min_length=1, examples=["[calculator]"])]
    tool_call_format: ToolCallFormat | None = None  # how the policy writes a call; None: as its chat template shows
    result_role: Literal["tool", "user"] = "tool"  # of the messages that bring results
    describe_tools: bool = True  # through the chat template; false: the prompt says what there is
    max_turns: Annotated[int, Field(ge=2)] = 8  # of the policy; with one no result would be read
    max_calls_per_turn: Count = 8  # the others are told so
    tool_timeout_s: Positive = 10.0  # of one call; those of a turn run side by side
    max_result_chars: Count = 4096  # of one result; the rest is cut off


class PythonEnv(Section):
    """Several turns with a class of your own, `module:Class`, which answers and rewards."""

    name: Literal["python"]
    target: Annotated[NonEmpty, Field(examples=["my_envs:Guess"])]
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)  # of the class
    max_turns: Count = 8  # of the policy
    timeout_s: Positive = 60.0  # of one call of a method


Env = SingleTurnEnv | ToolsEnv | PythonEnv
