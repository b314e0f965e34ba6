"""One PPO step of Tandem against one of TRL's PPOTrainer, on the same work, which is counted and compared.

    uv run --with trl==1.12.0 python benchmarks/ppo_step_vs_trl.py
    uv run --with trl==1.12.0 python benchmarks/ppo_step_vs_trl.py --device cuda --model qwen2-1.5b

1.12.0 is the last TRL with a PPOTrainer. It is no dependency of Tandem: `--with` brings it. `--side ours` does without.

Both train policy and critic from the same files on the same prompts: one response for each, of a fixed length, then as
many epochs of as many mini-batches, AdamW, GAE with lambda 0.95, the KL to a reference in the reward. Gradients are not
clipped and activations not computed again, on either side. Each side is a process of its own, in turn, as often as
there are rounds. Ours is `tandem train` with a recipe; a step's time is from one step's begin to the next one's, by its
own timeline. Figures are medians over all steps of all rounds, memory is the largest.

Work must be equal but for one thing: we compute the old log-probs with the trainer, TRL takes them from the logits
that it generated with, so ours is one forward pass more. Rewards are next to nothing on both sides, and more on ours:
TRL's reward model looks at one id, ours turns the ids into text and looks for an answer in it. TRL's one optimizer and
our two update the same number of parameters. Prompts of different lengths are padded by TRL and packed by us: padding
is shown and not counted. On CUDA, weights are float32 and passes bfloat16 (TRL: by autocast, which it has for updates
only; where it generates and infers it gets TF32, and a reference in bfloat16).

On a busy CPU set OMP_WAIT_POLICY=passive: OpenMP's threads spin while other processes have their cores, and that costs
TRL several times its step and ours little. OMP_NUM_THREADS should be what --threads says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # it is run as a file, too

from benchmarks.ppo_step.job import Job, Result  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402

SIDES = {"ours": "benchmarks.ppo_step.ours", "trl": "benchmarks.ppo_step.theirs"}
OLD_LOGPROBS = "old log-probs, forward tokens"
MAY_DIFFER = (OLD_LOGPROBS, "optimizer steps", "padding in passes")


def run_module(module: str, *arguments: Path) -> None:
    """In a process of its own, so that its peak of memory is its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")


def measure(job: Job, sides: Sequence[str], rounds: int) -> Iterator[tuple[str, Result]]:
    """The sides in turn, as often as there are rounds, on one model's files."""
    with tempfile.TemporaryDirectory(prefix="ppo-step-") as directory:
        told = Path(directory) / "job.json"
        replace(job, directory=directory).write(told)
        run_module("benchmarks.ppo_step.job", told)
        for number in range(rounds):
            for side in sides:
                out = Path(directory) / f"{side}-{number}.json"
                run_module(SIDES[side], told, out)
                yield side, Result.read(out)


def differences(ours: Result, trl: Result) -> list[str]:
    """What one side did and the other did not. Ours computes old log-probs by as many tokens as it infers values."""
    unlike = [
        f"{name}: ours {ours.work[name]:,}, TRL {trl.work[name]:,}"
        for name in ours.work
        if name not in MAY_DIFFER and ours.work[name] != trl.work[name]
    ]
    if (ours.work[OLD_LOGPROBS], trl.work[OLD_LOGPROBS]) != (ours.work["values, forward tokens"], 0):
        unlike.append(f"{OLD_LOGPROBS}: ours {ours.work[OLD_LOGPROBS]:,}, TRL {trl.work[OLD_LOGPROBS]:,}")
    if ours.work["optimizer steps"] != 2 * trl.work["optimizer steps"]:
        unlike.append(f"optimizer steps: ours {ours.work['optimizer steps']}, TRL {trl.work['optimizer steps']}")
    return unlike


def report(rounds: dict[str, list[Result]]) -> list[str]:
    """The tables: seconds, speed and memory, then the work."""
    lines = [f"| {'of one step, median':32} | " + " | ".join(f"{side:>14}" for side in rounds) + " | ours / TRL |"]
    lines.append("|---" * (len(rounds) + 2) + "|")
    figures = {side: figures_of(results) for side, results in rounds.items()}
    names = list(next(iter(figures.values())))
    for name in names:
        values = [found[name] for found in figures.values()]
        ratio = f"{values[0] / values[1]:.2f}" if len(values) > 1 and values[1] else ""
        lines.append(f"| {name:32} | " + " | ".join(f"{value:>14,.3f}" for value in values) + f" | {ratio:>10} |")
    lines += ["", f"| {'work of one step':32} | " + " | ".join(f"{side:>14}" for side in rounds) + " |"]
    lines.append("|---" * (len(rounds) + 1) + "|")
    works = [results[0].work for results in rounds.values()]
    lines += [f"| {name:32} | " + " | ".join(f"{work[name]:>14,}" for work in works) + " |" for name in works[0]]
    return lines


def figures_of(results: Sequence[Result]) -> dict[str, float]:
    """Medians over all steps of all rounds; the largest memory."""
    steps = [seconds for result in results for seconds in result.step_s]
    whole = statistics.median(steps)
    stages = {
        f"{stage}, s": [seconds for result in results for seconds in result.stages[stage]]
        for stage in results[0].stages
    }
    stages["other, s"] = [step - sum(parts) for step, *parts in zip(steps, *stages.values(), strict=True)]
    return {
        **{name: statistics.median(seconds) for name, seconds in stages.items()},
        "step, s": whole,
        "fastest step, s": min(steps),
        "slowest step, s": max(steps),
        "CPU time of a step, s": statistics.median([seconds for result in results for seconds in result.cpu_s]),
        "generated tokens/s": results[0].work["generated tokens"] / whole,
        **{
            f"peak memory, {what}, GiB": max(result.memory[what] for result in results) / 2**30
            for what in results[0].memory
        },
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("quickstart", *SHAPES), default="quickstart")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--engine", choices=("transformers", "vllm"), help="ours; vllm on CUDA")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, help="tokens; 0: as the problems are; 256 on CUDA")
    parser.add_argument("--response", type=int, help="tokens; 28 on a CPU, 512 on CUDA")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed ones, in each round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=("both", *SIDES), default="both")
    parser.add_argument("--trl-micro-batch", type=int, default=0, help="samples; 0: a mini-batch; 8 on CUDA")
    parser.add_argument("--trl-rollout-batch", type=int, default=0, help="samples; 0: all")
    parser.add_argument("--trl-weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of our recipe")
    return parser.parse_args(arguments)


def job_of(asked: argparse.Namespace) -> Job:
    cuda = asked.device == "cuda"

    def chosen(value, cpu, gpu):
        return value if value is not None else gpu if cuda else cpu

    if asked.samples % asked.mini_batches:
        raise SystemExit(f"--samples {asked.samples} is no multiple of --mini-batches {asked.mini_batches}")
    mini_batch = asked.samples // asked.mini_batches
    micro_batch = asked.trl_micro_batch or (min(8, mini_batch) if cuda else mini_batch)
    if mini_batch % micro_batch:
        raise SystemExit(f"a mini-batch of {mini_batch} samples is no multiple of TRL's micro-batch, {micro_batch}")
    return Job(
        directory="",
        model=asked.model,
        device=asked.device,
        dtype=chosen(asked.dtype, "float32", "bfloat16"),
        engine=chosen(asked.engine, "transformers", "vllm"),
        samples=asked.samples,
        prompt=chosen(asked.prompt, 0, 256),
        response=chosen(asked.response, 28, 512),
        epochs=asked.epochs,
        mini_batches=asked.mini_batches,
        steps=asked.steps,
        warmup=asked.warmup,
        threads=asked.threads,
        micro_batch=micro_batch,
        rollout_batch=asked.trl_rollout_batch,
        trl_weights=asked.trl_weights,
        settings=tuple(asked.set),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parse(arguments)
    job, sides = job_of(asked), tuple(SIDES) if asked.side == "both" else (asked.side,)
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        raise SystemExit("TRL is not installed: uv run --with trl==1.12.0 python benchmarks/ppo_step_vs_trl.py ...")
    print({name: value for name, value in vars(job).items() if name != "directory"})
    rounds: dict[str, list[Result]] = {side: [] for side in sides}
    for side, result in measure(job, sides, asked.rounds):
        rounds[side].append(result)
        print(f"{side}: {result.versions}; steps of {', '.join(f'{s:.3f}' for s in result.step_s)} s", flush=True)
    print("\n".join(report(rounds)))
    if len(sides) == 2 and (unlike := differences(rounds["ours"][0], rounds["trl"][0])):
        raise SystemExit("the sides did not do the same work:\n" + "\n".join(unlike))


if __name__ == "__main__":
    main()
