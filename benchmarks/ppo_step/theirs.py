"""TRL's side of `ppo_step_vs_trl.py`: its PPOTrainer as it is, with its forward passes counted and its stages timed.

Two things of it are set from here. Accelerate steps the optimizer once for each mini-batch: by itself it would do so
once an epoch, or after each micro-batch where the data set is one batch, whatever `num_mini_batches` says. And
`gradient_checkpointing` is off, which is faster: activations are kept on our side, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
)

from benchmarks.ppo_step.job import NEVER, Job, Result, Stages, chat_ids, watch_memory
from benchmarks.ppo_step.ours import updated_parameters

if TYPE_CHECKING:
    from trl.experimental.ppo import PPOTrainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LastToken(nn.Module):
    """TRL wants a reward model. This one costs nothing: it looks at the id of the last token."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = LastToken.Ids()
        self.score = nn.Identity()

    class Ids(nn.Module):
        """A backbone whose hidden state is the id, as a number between 0 and 1."""

        def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
            return SimpleNamespace(hidden_states=((input_ids % 16).float()[..., None] / 16,))


class Work:
    """Counts the work of a step, and cuts the step into stages."""

    def __init__(self, device: str) -> None:
        self.stages = Stages(device)
        self.counts: Counter[str] = Counter()
        self.ends: list[tuple[float, float]] = []  # by the wall's clock and by the CPU's
        self.seconds: list[dict[str, float]] = []
        self.works: list[dict[str, int]] = []
        self._generates = False
        self._later: list[tuple[str, Tensor]] = []  # counts on the device: asked at the step's end

    def watch(self, name: str, backbone: PreTrainedModel) -> None:
        """Count the tokens that pass through a model, but while it generates."""

        def enter(_: nn.Module, __: tuple[object, ...], inputs: dict[str, Any]) -> None:
            if self._generates:
                return
            trains = torch.is_grad_enabled()
            self.stages.to("update" if trains else "forwards")
            kind = f"{name} {'trained' if trains else 'inferred'}"
            self._later.append((f"{kind} tokens", inputs["attention_mask"].sum()))
            self.counts[f"{kind} slots"] += inputs["input_ids"].numel()

        backbone.register_forward_pre_hook(enter, with_kwargs=True)

    def generation(self, generate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """TRL's batch_generation, timed; every token of a response that is no padding counts."""

        def timed(model: nn.Module, queries: Tensor, batch: int, pad: int, config: object) -> tuple[Tensor, Tensor]:
            self.stages.to("generate")
            self._generates = True
            rows, logits = generate(model, queries, batch, pad, config)
            self._generates = False
            self._later.append(("generated tokens", (rows[:, queries.shape[1] :] != pad).sum()))
            self.stages.to("forwards")
            return rows, logits

        return timed

    def mean(self, masked_mean: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """TRL's masked_mean, which averages both losses (they carry a gradient) and their clipped fractions."""

        def counted(values: Tensor, mask: Tensor, *axis: object) -> Tensor:
            if values.requires_grad:
                self._later.append(("loss", mask.sum()))
            return masked_mean(values, mask, *axis)

        return counted

    def stepped(self, optimizer: Optimizer, *_: object) -> None:
        self.counts["optimizer steps"] += 1
        self.counts["updated parameters"] += updated_parameters(optimizer)

    def end_of_step(self) -> None:
        self.stages.to("other")
        self.ends.append((time.perf_counter(), time.process_time()))
        self.seconds.append(self.stages.take())
        for name, count in self._later:
            self.counts[name] += int(count)
        self.works.append(work_of(self.counts))
        self.counts, self._later = Counter(), []


class EndOfStep(TrainerCallback):
    """TRL calls it when a step is trained and logged."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def on_step_end(self, *_: object, **__: object) -> None:
        self._work.end_of_step()


def work_of(counts: Counter[str]) -> dict[str, int]:
    """One step's work, in the words that both sides use. Old log-probs come from the logits of generation."""
    return {
        "generated tokens": counts["generated tokens"],
        "old log-probs, forward tokens": counts["policy inferred tokens"],
        "reference, forward tokens": counts["reference inferred tokens"],
        "values, forward tokens": counts["critic inferred tokens"],
        "policy, trained tokens": counts["policy trained tokens"],
        "critic, trained tokens": counts["critic trained tokens"],
        "policy, tokens in the loss": counts["loss"] // 2,  # one mask for the policy's, one for the critic's
        "critic, tokens in the loss": counts["loss"] - counts["loss"] // 2,
        "updated parameters": counts["updated parameters"],
        "optimizer steps": counts["optimizer steps"],
        "padding in passes": sum(n for name, n in counts.items() if name.endswith("slots"))
        - sum(n for name, n in counts.items() if name.endswith(("inferred tokens", "trained tokens"))),
    }


def build(job: Job, work: Work) -> PPOTrainer:
    """The trainer on the job's model and prompts. The critic's backbone is the policy's, its head is new."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    micro = job.micro_batch or job.mini_batch
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(dir=job.directory),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=job.samples // micro,
        num_mini_batches=job.mini_batches,
        num_ppo_epochs=job.epochs,
        total_episodes=job.samples * (job.warmup + job.steps + 1),
        local_rollout_forward_batch_size=job.rollout_batch or job.samples,
        response_length=job.response,
        temperature=1.0,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=job.dtype == "bfloat16",
        use_cpu=job.device == "cpu",
        tf32=True if job.device == "cuda" else None,  # what it does not run in bfloat16: generation, values, reference
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(job.model_dir, padding_side="left", pad_token=NEVER)
    rows = [chat_ids(tokenizer, question) for question in questions(job)]
    trained = DTYPES[job.trl_weights]
    models = {
        "policy": AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=trained),
        "critic": AutoModelForSequenceClassification.from_pretrained(job.model_dir, dtype=trained, num_labels=1),
        "reference": AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=DTYPES[job.dtype]),
    }
    for name, model in models.items():
        work.watch(name, model.base_model)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=models["policy"],
        ref_model=models["reference"],
        value_model=models["critic"],
        reward_model=LastToken(),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[:1]}),
        callbacks=[EndOfStep(work)],
    )
    if (trainer.accelerator.mixed_precision == "bf16") != (job.dtype == "bfloat16"):
        raise RuntimeError(f"TRL computes in {trainer.accelerator.mixed_precision}, asked was {job.dtype}")
    state = trainer.accelerator.gradient_state
    state.plugin_kwargs |= {"num_steps": job.mini_batch // micro, "sync_with_dataloader": False}
    return trainer


def questions(job: Job) -> list[str]:
    return [json.loads(line)["question"] for line in job.prompts.read_text().splitlines()]


def run(job: Job) -> Result:
    """Train as long as our side does; the last step is not timed there, and not here."""
    import trl
    from trl.experimental.ppo import ppo_trainer

    torch.set_num_threads(job.threads)
    if job.dtype == "bfloat16":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # what `accelerate launch` sets: the trainer asks it alone
    work = Work(job.device)
    ppo_trainer.batch_generation = work.generation(ppo_trainer.batch_generation)
    ppo_trainer.masked_mean = work.mean(ppo_trainer.masked_mean)
    handle = register_optimizer_step_post_hook(work.stepped)
    result = Result(f"trl {trl.__version__}, transformers {transformers.__version__}", [], [], {}, {})
    with watch_memory(job, result.memory):
        build(job, work).train()
    handle.remove()
    timed = slice(job.warmup, job.warmup + job.steps)
    lasted = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise([(0.0, 0.0), *work.ends])][timed]
    result.step_s, result.cpu_s = [wall for wall, _ in lasted], [cpu for _, cpu in lasted]
    for stage in ("generate", "forwards", "update"):
        result.stages[stage] = [seconds[stage] for seconds in work.seconds][timed]
    if any(step != work.works[0] for step in work.works):
        raise RuntimeError(f"the steps did not all do the same work: {work.works}")
    result.work = work.works[0]
    return result


def main() -> None:
    job, out = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    run(job).write(out)


if __name__ == "__main__":
    main()
