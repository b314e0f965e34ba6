"""vLLM through our engine and vLLM alone: `python benchmarks/vllm_gpu.py ours|alone`; with `ours --sleep` a sync, too.

An engine that can sleep schedules step by step: its rates are another column.

On a GPU: random weights of the shape of Qwen2-1.5B in bfloat16; prompts of 128 tokens, 256 new ones, log-probs on.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.config.models import VllmEngine
from tandem.roles import Engine
from tandem.types import Sampling

SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PROMPT, NEW = 128, 256
GIB = 1 << 30


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, 100_000, (count, PROMPT), generator=generator).tolist()


async def through_ours(engine: Engine, count: int) -> float:
    """Tokens a second."""
    start = time.perf_counter()
    requests = [engine.generate(p, Sampling(NEW, 1.0, seed, ())) for seed, p in enumerate(prompts(count))]
    written = sum(len(generation.tokens) for generation in await asyncio.gather(*requests))
    return written / (time.perf_counter() - start)


async def sync_time(engine: Engine, weights: list[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
    """Milliseconds of each part of a sync, weights in this process."""
    parts: dict[str, float] = {}

    async def timed(name: str, call) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        await call
        torch.cuda.synchronize()
        parts[name] = 1e3 * (time.perf_counter() - start)

    await timed("pause", engine.pause())
    await timed("sleep", engine.sleep(keep_weights=False))
    await timed("wake", engine.wake())
    await timed("load", engine.load_weights(version, weights))
    await timed("fingerprint", engine.fingerprint())
    await timed("resume", engine.resume())
    return parts


async def ours(model: str, settings: VllmEngine, counts: list[int], rounds: int, can_sleep: bool) -> None:
    from tandem.rollout.vllm.engine import vllm_engine

    engine = vllm_engine(
        settings,
        model=model,
        precision="bfloat16",
        max_total_sequence_length=PROMPT + NEW,
        trust_remote_code=False,
        can_sleep=can_sleep,
    )
    for count in counts:
        rates = [await through_ours(engine, count) for _ in range(rounds + 1)][1:]
        print(f"ours        {count:5} sequences {statistics.median(rates):9.0f} tok/s")
    if can_sleep:
        await show_sync(engine, model, rounds)
    await engine.close()


async def show_sync(engine: Engine, model: str, rounds: int) -> None:
    source = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    weights = list(source.named_parameters())
    syncs = [await sync_time(engine, weights, version) for version in range(rounds + 1)][1:]
    shown = "  ".join(f"{name} {statistics.median(sync[name] for sync in syncs):.1f}" for name in syncs[0])
    print(f"sync of {sum(t.nbytes for _, t in weights) / GIB:.2f} GiB, ms: {shown}")


def alone(model: str, settings: VllmEngine, counts: list[int], rounds: int) -> None:
    """vLLM by its own front door in this process, asynchronous scheduling as it likes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as ours; and CUDA is in use here, which no fork survives
    from vllm import LLM, SamplingParams  # type: ignore  # not every checkout has vllm

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=PROMPT + NEW,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
    )
    for count in counts:
        rates = []
        for _ in range(rounds + 1):
            laws = [
                SamplingParams(max_tokens=NEW, seed=seed, logprobs=0, ignore_eos=True, detokenize=False)
                for seed in range(count)
            ]
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts(count)], laws, use_tqdm=False)
            written = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.append(written / (time.perf_counter() - start))
        print(f"vLLM alone  {count:5} sequences {statistics.median(rates[1:]):9.0f} tok/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["ours", "alone"], help="one a process: vLLM gives no GPU memory back")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", action="store_true", help="of ours: an engine that can, and the time of a sync")
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/vllm_gpu.py needs a CUDA device and the package vllm: none is here")
    settings = VllmEngine(name="vllm", max_num_seqs=max(parsed.sequences), gpu_memory_utilization=0.5)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(directory)
        if parsed.what == "alone":
            alone(directory, settings, parsed.sequences, parsed.rounds)
        else:
            asyncio.run(ours(directory, settings, parsed.sequences, parsed.rounds, parsed.sleep))


if __name__ == "__main__":
    main()
