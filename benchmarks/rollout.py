"""An engine against `model.generate` per batch: `python benchmarks/rollout.py [--threads N] [--engine vllm]`.

All run the quickstart model in float32 on the same prompts, alternating, in one process. Ours returns the log-probs of
the sampled law, which PPO needs; the peer runs with them (from its logits) and without. Tokens count to each row's end.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tandem.config.models import VllmEngine
from tandem.data.arithmetic import problem
from tandem.roles import Engine
from tandem.rollout.transformers import transformers_engine
from tandem.types import Sampling

MODEL = Path(__file__).parents[1] / "tandem" / "assets" / "quickstart"
SLOTS, SAMPLES, LENGTH = 64, 4, 512

Request = tuple[Sequence[int], Sampling]


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


def cases(stop: int) -> dict[str, list[Request]]:
    """The quickstart's step; the same with every row of full length; and a heavy tail of lengths (Pareto, 8 to 256)."""
    short = Sampling(28, 1.0, 0, (stop,))
    dice = random.Random(0)
    tail = groups(quickstart_prompts(64), replace(short, stop_token_ids=()))
    tail = [(p, replace(law, max_new_tokens=min(256, int(8 * dice.paretovariate(0.9))))) for p, law in tail]
    return {
        "16 x 4, 28 new tokens, stop token": groups(quickstart_prompts(16), short),
        "16 x 4, 28 new tokens, no stop": groups(quickstart_prompts(16), replace(short, stop_token_ids=())),
        "64 x 4, heavy-tailed lengths": tail,
    }


def run_peer(model: LlamaForCausalLM, requests: Sequence[Request], pad: int, *, with_logprobs: bool) -> int:
    """Batches of as many rows as we have slots; a batch ends with its longest row, as `generate` does."""
    written = 0
    for start in range(0, len(requests), SLOTS):
        part = requests[start : start + SLOTS]
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


def build(engine: str, model: LlamaForCausalLM) -> Engine:
    """Either engine, with as many slots."""
    if engine == "transformers":
        pad = model.config.pad_token_id
        return transformers_engine(
            model, max_concurrent_samples=SLOTS, max_total_sequence_length=LENGTH, pad_token_id=pad
        )
    from tandem.rollout.vllm.engine import vllm_engine

    section = VllmEngine(name="vllm", max_num_seqs=SLOTS, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    return vllm_engine(
        section,
        model=str(MODEL),
        precision="float32",
        max_total_sequence_length=LENGTH,
        trust_remote_code=False,
        can_sleep=False,
    )


async def compare(rounds: int, kind: str) -> None:
    model, peer = (LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval() for _ in range(2))
    pad, stop = model.config.pad_token_id, model.config.eos_token_id
    peer.generation_config.eos_token_id = None
    engine = build(kind, model)

    async def ours(requests: Sequence[Request]) -> int:
        generations = await asyncio.gather(*[engine.generate(prompt, law) for prompt, law in requests])
        return sum(len(generation.tokens) for generation in generations)

    print(f"{'tokens/s, median (ratio: wall, CPU)':36} {'ours':>7} {'generate':>9} {'':11} {'+ log-probs':>12}")
    for name, requests in cases(stop).items():
        runs: list[list[tuple[float, float]]] = [[], [], []]
        for _ in range(rounds + 1):
            start = clocks()
            written = await ours(requests)
            runs[0].append(rates(start, written))
            for column, with_logprobs in ((1, False), (2, True)):
                start = clocks()
                written = run_peer(peer, requests, pad, with_logprobs=with_logprobs)
                runs[column].append(rates(start, written))
        (us, us_cpu), *peers = ([statistics.median(rate) for rate in zip(*run[1:], strict=True)] for run in runs)
        shown = [f"{wall:9.0f} {us / wall:5.2f} {us_cpu / cpu:5.2f}" for wall, cpu in peers]
        print(f"{name:36} {us:7.0f} {'   '.join(shown)}")
    await engine.close()


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
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asyncio.run(compare(arguments.rounds, arguments.engine))


if __name__ == "__main__":
    main()
