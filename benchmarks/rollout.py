"""The transformers engine against `model.generate` per batch: `python benchmarks/rollout.py [--threads 1] [--rounds 7]`.

Both run the quickstart model in float32 on the same prompts, alternating, in one process. The peer samples with plain
`generate` and returns no log-probs; ours returns those of the sampled law. A token counts up to its row's end.
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

from tandem.data.arithmetic import problem
from tandem.rollout.transformers import TransformersEngine
from tandem.types import Sampling

MODEL = Path(__file__).parents[1] / "tandem" / "assets" / "quickstart"
SLOTS, SAMPLES = 64, 4

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
    """The quickstart's step; the same with every row of full length; and lengths with a heavy tail (Pareto, 8 to 256)."""
    short = Sampling(28, 1.0, 0, (stop,))
    dice = random.Random(0)
    tail = groups(quickstart_prompts(64), replace(short, stop_token_ids=()))
    tail = [(p, replace(law, max_new_tokens=min(256, int(8 * dice.paretovariate(0.9))))) for p, law in tail]
    return {
        "16 x 4, 28 new tokens, stop token": groups(quickstart_prompts(16), short),
        "16 x 4, 28 new tokens, no stop": groups(quickstart_prompts(16), replace(short, stop_token_ids=())),
        "64 x 4, heavy-tailed lengths": tail,
    }


def run_peer(model: LlamaForCausalLM, requests: Sequence[Request], pad: int) -> int:
    """Batches of as many rows as we have slots; a batch ends with its longest row, as `generate` does."""
    written = 0
    for start in range(0, len(requests), SLOTS):
        part = requests[start : start + SLOTS]
        width = max(len(prompt) for prompt, _ in part)
        longest = max(law.max_new_tokens for _, law in part)
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt, _ in part])
        stops = part[0][1].stop_token_ids
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=(ids != pad).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=None if stops else longest,
                eos_token_id=list(stops) or None,
                pad_token_id=pad,
            )[:, width:].tolist()
        written += sum(own_length(row, law) for row, (_, law) in zip(rows, part, strict=True))
    return written


def own_length(row: list[int], law: Sampling) -> int:
    ends = [row.index(stop) + 1 for stop in law.stop_token_ids if stop in row]
    return min([*ends, law.max_new_tokens, len(row)])


async def compare(rounds: int) -> None:
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    peer = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    pad, stop = model.config.pad_token_id, model.config.eos_token_id
    engine = TransformersEngine(model, max_concurrent_samples=SLOTS, max_total_sequence_length=512, pad_token_id=pad)
    print(f"{'case':36} {'ours s':>8} {'peer s':>8} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>6}")
    for name, requests in cases(stop).items():
        ours: list[tuple[float, int]] = []
        theirs: list[tuple[float, int]] = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            generations = await asyncio.gather(*[engine.generate(prompt, law) for prompt, law in requests])
            ours.append((time.perf_counter() - start, sum(len(g.tokens) for g in generations)))
            start = time.perf_counter()
            written = run_peer(peer, requests, pad)
            theirs.append((time.perf_counter() - start, written))
        (our_s, our_rate), (peer_s, peer_rate) = medians(ours[1:]), medians(theirs[1:])
        ratio = our_rate / peer_rate
        print(f"{name:36} {our_s:8.3f} {peer_s:8.3f} {our_rate:11.0f} {peer_rate:11.0f} {ratio:6.2f}")
    await engine.close()


def medians(runs: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Seconds, and tokens a second."""
    return statistics.median(s for s, _ in runs), statistics.median(tokens / s for s, tokens in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asyncio.run(compare(arguments.rounds))


if __name__ == "__main__":
    main()
