"""An engine against `model.generate` per batch: `python benchmarks/rollout.py [--engine vllm] [--only 256]`.

All run the quickstart model in float32 on the same prompts, alternating, in one process. Ours returns the log-probs of
the sampled law, which PPO needs; the peer runs with them (from its logits) and without. Tokens count to each row's end.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tandem.config.models import VllmEngine
from tandem.data.arithmetic import problem
from tandem.roles import Engine
from tandem.rollout.transformers import transformers_engine
from tandem.types import Sampling

MODEL = Path(__file__).parents[1] / "tandem" / "assets" / "quickstart"
SAMPLES, LENGTH = 4, 512

Request = tuple[Sequence[int], Sampling]


@dataclass(frozen=True)
class Case:
    """Requests that are sent at once, and how many of them may be written together on either side."""

    name: str
    slots: int
    requests: list[Request]


def quickstart_prompts(count: int) -> list[list[int]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    chats = [[{"role": "user", "content": problem(0, index).question}] for index in range(count)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def groups(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
    return [
        (prompt, replace(sampling, seed=index * SAMPLES + sample))
        for index, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


def cases(stop: int) -> list[Case]:
    """The quickstart's step; rows of one length, 64 to 1,024 at once; a heavy tail of lengths (Pareto, 8 to 256)."""
    short = Sampling(28, 1.0, 0, (stop,))
    full = replace(short, stop_token_ids=())
    dice = random.Random(0)
    tail = [
        (prompt, replace(law, max_new_tokens=min(256, int(8 * dice.paretovariate(0.9)))))
        for prompt, law in groups(quickstart_prompts(64), full)
    ]
    return [
        Case("16 x 4, 28 new tokens, stop token", 64, groups(quickstart_prompts(16), short)),
        *(
            Case(f"{slots} rows at once, 28 new tokens", slots, groups(quickstart_prompts(slots // SAMPLES), full))
            for slots in (64, 256, 1024)
        ),
        Case("64 x 4 on 64 slots, heavy tail", 64, tail),
    ]


def run_peer(model: LlamaForCausalLM, case: Case, pad: int, *, with_logprobs: bool) -> int:
    """Batches of as many rows as we have slots; a batch ends with its longest row, as `generate` does."""
    written = 0
    for start in range(0, len(case.requests), case.slots):
        part = case.requests[start : start + case.slots]
        width = max(len(prompt) for prompt, _ in part)
        longest = max(law.max_new_tokens for _, law in part)
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt, _ in part])
        stops = part[0][1].stop_token_ids
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=(ids != pad).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=longest,
                eos_token_id=list(stops) or None,
                pad_token_id=pad,
                return_dict_in_generate=True,
                output_logits=with_logprobs,
            )
            new = output.sequences[:, width:]
            if with_logprobs:
                logprobs = torch.stack([logits.log_softmax(-1) for logits in output.logits], dim=1)
                logprobs.gather(-1, new[..., None]).tolist()
        written += sum(own_length(row, law) for row, (_, law) in zip(new.tolist(), part, strict=True))
    return written


def own_length(row: list[int], law: Sampling) -> int:
    ends = [row.index(stop) + 1 for stop in law.stop_token_ids if stop in row]
    return min([*ends, law.max_new_tokens, len(row)])


def build(engine: str, model: LlamaForCausalLM, slots: int) -> Engine:
    """Either engine, with as many slots."""
    if engine == "transformers":
        pad = model.config.pad_token_id
        return transformers_engine(
            model, max_concurrent_samples=slots, max_total_sequence_length=LENGTH, pad_token_id=pad
        )
    from tandem.rollout.vllm.engine import vllm_engine

    section = VllmEngine(name="vllm", max_num_seqs=slots, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    return vllm_engine(
        section,
        model=str(MODEL),
        precision="float32",
        max_total_sequence_length=LENGTH,
        trust_remote_code=False,
        can_sleep=False,
    )


async def compare(rounds: int, kind: str, only: str) -> None:
    peer = load()
    peer.generation_config.eos_token_id = None
    print(f"{'tokens/s, median (ratio: wall, CPU)':36} {'ours':>7} {'generate':>9} {'':11} {'+ log-probs':>12}")
    for case in cases(peer.config.eos_token_id):
        if only in case.name:
            engine = build(kind, load(), case.slots)
            await compare_case(case, rounds, engine, peer)
            await engine.close()


def load() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


async def compare_case(case: Case, rounds: int, engine: Engine, peer: LlamaForCausalLM) -> None:
    """One line of the table. The first round warms up."""
    pad = peer.config.pad_token_id
    runs: list[list[tuple[float, float]]] = [[], [], []]
    for _ in range(rounds + 1):
        start = clocks()
        generations = await asyncio.gather(*[engine.generate(prompt, law) for prompt, law in case.requests])
        runs[0].append(rates(start, sum(len(generation.tokens) for generation in generations)))
        for column, with_logprobs in ((1, False), (2, True)):
            start = clocks()
            written = run_peer(peer, case, pad, with_logprobs=with_logprobs)
            runs[column].append(rates(start, written))
    (us, us_cpu), *peers = ([statistics.median(rate) for rate in zip(*run[1:], strict=True)] for run in runs)
    shown = [f"{wall:9.0f} {us / wall:5.2f} {us_cpu / cpu:5.2f}" for wall, cpu in peers]
    print(f"{case.name:36} {us:7.0f} {'   '.join(shown)}", flush=True)


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds: on a shared machine the second is the steadier."""
    return time.perf_counter(), time.process_time()


def rates(start: tuple[float, float], tokens: int) -> tuple[float, float]:
    """Tokens a second by both clocks."""
    wall, cpu = clocks()
    return tokens / (wall - start[0]), tokens / (cpu - start[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--only", default="", help="a part of a case's name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asyncio.run(compare(arguments.rounds, arguments.engine, arguments.only))


if __name__ == "__main__":
    main()
