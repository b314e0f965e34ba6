"""Our side of `ppo_step_vs_trl.py`: `tandem train` on a recipe, in this process, its forward passes counted."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers import AutoConfig

import tandem
from benchmarks.ppo_step.job import Job, Result, watch_memory
from tandem.config.load import load
from tandem.launch.session import train
from tandem.train.backend import Output, Pack
from tandem.train.heads import ValueHead
from tandem.train.torch.attention import Layout
from tandem.train.torch.backend import BackboneWithHead

STAGES = {
    "generate": ("control/wait_for_groups",),
    "forwards": ("actor/infer", "critic/infer", "reference/infer"),
    "update": ("actor/forward_backward", "critic/forward_backward", "actor/optim_step", "critic/optim_step"),
}


def recipe(job: Job, run_dir: Path) -> dict[str, Any]:
    """TRL's own settings, where it has no choice: KL in the reward (k1), whitened advantages, no clip of the gradient.

    What stands here is public: it is the file that a user would write.
    """
    prompt = job.prompt or 64
    engine: dict[str, Any] = {"name": job.engine}
    if job.engine == "transformers":
        engine["max_concurrent_samples"] = job.samples
    else:
        engine |= {"max_num_seqs": job.samples, "kv_cache_memory_bytes": cache_bytes(job, prompt + job.response)}
    trained = {"precision": job.dtype, "max_grad_norm": None, "optimizer": {"lr": 3e-6}}
    return {
        "name": "ppo_step",
        "run_dir": str(run_dir),
        "ppo": {
            "num_prompts_per_step": job.samples,
            "num_generations_per_prompt": 1,
            "max_num_steps": job.warmup + job.steps + 1,  # the last one only ends the one before it
            "ppo_epochs": job.epochs,
            "adv_estimator": {"name": "gae", "gae_lambda": 0.95},
        },
        "policy": {
            **trained,
            "model_name": str(job.model_dir),
            "train_global_batch_size": job.mini_batch,
            "max_total_sequence_length": prompt + job.response,
            "generation": {"max_new_tokens": job.response, "engine": engine},
        },
        "value": trained,
        "reference": {},
        "loss_fn": {
            "reference_policy_kl_penalty": 0.05,
            "reference_policy_kl_type": "k1",
            "use_kl_in_reward": True,
        },
        "value_loss_fn": {"name": "mse"},
        "data": {"train": {"name": "file", "path": str(job.prompts)}, "shuffle": False},
        "env": {"name": "single_turn", "verifier": {"name": "arithmetic"}},
        "checkpointing": {"enabled": False},
        "logger": {"console": "silent", "tensorboard": False},
        "cluster": {"device": job.device, "num_threads": job.threads},
    }


def cache_bytes(job: Job, tokens: int) -> int:
    """vLLM's cache: room for all samples at their full length, and a quarter more."""
    shape = AutoConfig.from_pretrained(job.model_dir)
    head = shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head * (2 if job.dtype == "bfloat16" else 4)
    return job.samples * tokens * token * 5 // 4


@contextmanager
def counting(counts: Counter[str], cpu_s: list[float]) -> Generator[None]:
    """Count what passes through models of trainers and what optimizers step.

    `cpu_s` gets this process's CPU seconds whenever a step's first pass begins.
    """
    forward, trained = BackboneWithHead.forward, True

    def counted(self: BackboneWithHead, pack: Pack, layout: Layout) -> Output:
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        model = "critic" if isinstance(self.head, ValueHead) else "actor" if is_trained else "reference"
        nonlocal trained
        if trained and not torch.is_grad_enabled():
            cpu_s.append(time.process_time())
        trained = torch.is_grad_enabled()
        kind = f"{model} {'trained' if trained else 'inferred'}"
        counts[f"{kind} tokens"] += pack.tokens
        counts[f"{kind} slots"] += len(pack.tokens_P)
        counts[f"{kind} loss"] += len(pack.wanted_R)
        return forward(self, pack, layout)

    def stepped(optimizer: Optimizer, *_: object) -> None:
        counts["optimizer steps"] += 1
        counts["updated parameters"] += updated_parameters(optimizer)

    BackboneWithHead.forward = counted
    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        BackboneWithHead.forward = forward
        handle.remove()


def updated_parameters(optimizer: Optimizer) -> int:
    """Numbers that a step has changed: those with a gradient."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def run(job: Job) -> Result:
    """Train, then read what the run has written down."""
    run_dir, recipe_file = Path(tempfile.mkdtemp(dir=job.directory)), Path(job.directory) / "ppo_step.yaml"
    recipe_file.write_text(json.dumps(recipe(job, run_dir)))  # JSON is YAML
    counts: Counter[str] = Counter()
    clocks: list[float] = []
    result = Result(f"tandem {tandem.__version__}, transformers {transformers.__version__}", [], [], {}, {})
    with watch_memory(job, result.memory), counting(counts, clocks):
        code = train(load(str(recipe_file), job.settings))
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = slice(job.warmup, job.warmup + job.steps)
    begins = step_begins(run_dir / "timeline.json")
    result.step_s = [end - begin for begin, end in pairwise(begins)][timed]
    result.cpu_s = [end - begin for begin, end in pairwise(clocks)][timed]
    for stage, spans in STAGES.items():
        result.stages[stage] = [sum(record[f"time/{name}_s"] for name in spans) for record in records][timed]
    steps = job.warmup + job.steps + 1
    if any(count % steps for count in counts.values()) or len({r["rollout/tokens"] for r in records}) > 1:
        raise RuntimeError(f"the steps did not all do the same work: {dict(counts)} in {steps} steps")
    result.work = work_of({name: count // steps for name, count in counts.items()}, int(records[0]["rollout/tokens"]))
    return result


def step_begins(timeline: Path) -> list[float]:
    """When each step began to wait for its samples, in seconds."""
    events = json.loads(timeline.read_text())
    return sorted(event["ts"] / 1e6 for event in events if event["name"] == "control/wait_for_groups")


def work_of(counts: dict[str, int], generated: int) -> dict[str, int]:
    """One step's work, in the words that both sides use."""
    return {
        "generated tokens": generated,
        "old log-probs, forward tokens": counts["actor inferred tokens"],
        "reference, forward tokens": counts["reference inferred tokens"],
        "values, forward tokens": counts["critic inferred tokens"],
        "policy, trained tokens": counts["actor trained tokens"],
        "critic, trained tokens": counts["critic trained tokens"],
        "policy, tokens in the loss": counts["actor trained loss"],
        "critic, tokens in the loss": counts["critic trained loss"],
        "updated parameters": counts["updated parameters"],
        "optimizer steps": counts["optimizer steps"],
        "padding in passes": sum(n for name, n in counts.items() if name.endswith("slots"))
        - sum(n for name, n in counts.items() if name.endswith("tokens")),
    }


def main() -> None:
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as the command line sets it
    job, out = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    run(job).write(out)


if __name__ == "__main__":
    main()
