"""vLLM through our engine and by its own front door, `LLM.generate`: `python benchmarks/vllm_gpu.py [--sleep]`.

On a GPU: random weights of the shape of Qwen2-1.5B in bfloat16; prompts of 128 tokens, 256 new ones, log-probs on, a
seed for each request. Both write the same requests in turn, in one process and with one vLLM: what differs is the way.
With `--sleep` the engine is one that can sleep, and a sync of weights is measured part by part.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import fields

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.shapes import SHAPES
from tandem.config.models import VllmEngine
from tandem.roles import Engine
from tandem.types import Sampling

PROMPT, NEW = 128, 256
GIB = 1 << 30


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, 100_000, (count, PROMPT), generator=generator).tolist()


async def through_ours(engine: Engine, count: int) -> float:
    """Tokens a second."""
    asked = prompts(count)
    start = time.perf_counter()
    requests = [engine.generate(p, Sampling(NEW, 1.0, seed, ())) for seed, p in enumerate(asked)]
    written = sum(len(generation.tokens) for generation in await asyncio.gather(*requests))
    return written / (time.perf_counter() - start)


def alone(llm, count: int) -> float:
    """Tokens a second."""
    from vllm import SamplingParams  # type: ignore  # not every checkout has vllm

    asked = [{"prompt_token_ids": p} for p in prompts(count)]
    start = time.perf_counter()
    laws = [
        SamplingParams(max_tokens=NEW, seed=seed, logprobs=0, ignore_eos=True, detokenize=False)
        for seed in range(count)
    ]
    written = sum(len(o.outputs[0].token_ids) for o in llm.generate(asked, laws, use_tqdm=False))
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


async def measure(model: str, settings: VllmEngine, counts: list[int], rounds: int, can_sleep: bool) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as ours; and CUDA is in use here, which no fork survives
    from vllm import LLM  # type: ignore  # as above

    from tandem.rollout.threaded import ThreadedEngine
    from tandem.rollout.vllm.decoder import VllmDecoder
    from tandem.rollout.vllm.engine import engine_args

    args = engine_args(
        settings,
        model=model,
        precision="bfloat16",
        max_total_sequence_length=PROMPT + NEW,
        trust_remote_code=False,
        can_sleep=can_sleep,
    )
    llm = LLM(**{field.name: getattr(args, field.name) for field in fields(args)})
    engine = ThreadedEngine(VllmDecoder(llm.llm_engine), name="vllm-engine")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; tokens/s, median of {rounds} (lowest to highest)"
    )
    for count in counts:
        both: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            both.append((await through_ours(engine, count), alone(llm, count)))
        ours, theirs = zip(*both[1:], strict=True)
        ratio = statistics.median(a / b for a, b in both[1:])
        print(f"{count:5} sequences: ours {shown(ours)}, vLLM alone {shown(theirs)}, ratio {ratio:.2f}", flush=True)
    if can_sleep:
        await show_sync(engine, model, rounds)
    await engine.close()


def shown(rates: tuple[float, ...]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


async def show_sync(engine: Engine, model: str, rounds: int) -> None:
    source = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    weights = list(source.named_parameters())
    syncs = [await sync_time(engine, weights, version) for version in range(rounds + 1)][1:]
    parts = "  ".join(f"{name} {statistics.median(sync[name] for sync in syncs):.1f}" for name in syncs[0])
    print(f"sync of {sum(t.nbytes for _, t in weights) / GIB:.2f} GiB, ms: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", action="store_true", help="an engine that can, and the time of a sync")
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/vllm_gpu.py needs a CUDA device and the package vllm: none is here")
    settings = VllmEngine(name="vllm", max_num_seqs=max(parsed.sequences), gpu_memory_utilization=0.5)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen2ForCausalLM(SHAPES["qwen2-1.5b"]).to(torch.bfloat16).save_pretrained(directory)
        asyncio.run(measure(directory, settings, parsed.sequences, parsed.rounds, parsed.sleep))


if __name__ == "__main__":
    main()
