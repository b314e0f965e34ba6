"""THE algorithm: what one batch teaches. PPO with a critic; every other estimator is the same step with critic None."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from tandem.algorithms.estimate import Columns, Estimate, estimate
from tandem.algorithms.kl import AdaptiveKl, exceeds_target_kl, update_kl
from tandem.algorithms.layout import AverageKind, averaging_weights
from tandem.config.algorithm import Gae, Grpo, PolicyLoss, Ppo
from tandem.roles import DataPlane, Trainer
from tandem.types import Batch, Metrics, Sum, Trace, merge

VALUE_AFTER = "values_after"  # the critic's estimate after a sample's last token
Span = Callable[[str], AbstractContextManager[None]]

AVERAGES: Mapping[str, AverageKind] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
}


@dataclass(frozen=True)
class Share:
    """What a sample adds to the divisors of its mini-batch: of the policy loss, the value loss, the NLL term."""

    policy: float
    value: float
    nll: float

    def __add__(self, other: Share) -> Share:
        return Share(self.policy + other.policy, self.value + other.value, self.nll + other.nll)


class PPO:
    """One step: infer, estimate advantages, then epochs of mini-batches, critic first."""

    def __init__(
        self,
        algorithm: Ppo | Grpo,
        loss_fn: PolicyLoss,
        *,
        mini_batch: int,
        max_new_tokens: int,
        seed: int,
        plane: DataPlane,
        actor: Trainer,
        critic: Trainer | None,
        reference: Trainer | None,
        span: Span,
        streaming: bool,
        traced: bool = False,
    ) -> None:
        """`mini_batch` is in samples. `max_new_tokens` is the fixed length of `seq-mean-token-sum-norm`.

        `traced`: trainers write down what they learn from.
        """
        self._algorithm = algorithm
        self._loss_fn = loss_fn
        self._mini_batch = mini_batch
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._plane = plane
        self._actor = actor
        self._critic = critic
        self._reference = reference
        self._span = span
        self._streaming = streaming
        self._traced = traced
        self._kl_coefficient = loss_fn.reference_policy_kl_penalty

    async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
        """Train on the step's chunks. In critic warm-up (`train_policy` False) the actor only infers.

        A chunk goes through inference as it arrives. The rest waits for the whole step, but for the critic's gradient
        where the step is one update: returns need no batch statistic, so it is added up chunk by chunk.
        """
        parts, metrics = [], {}
        async for chunk in chunks:
            metrics = merge(metrics, await self._infer(self._minibatches(chunk, step, epoch=0)))
            if self._critic_streams:
                metrics = merge(metrics, await self._add_critic_gradient(chunk))
            parts.append(chunk)
        batch = Batch.join(parts)
        with self._span("advantages/estimate"):
            shares, estimated = await self._estimate_advantages(batch)
        self._adapt_kl(estimated, len(batch))
        metrics = merge(metrics, estimated.metrics)
        for learners in self._passes(train_policy):
            metrics = merge(metrics, await self._epochs(batch, shares, step, learners))
        return metrics

    def _passes(self, train_policy: bool) -> list[set[str]]:
        """Who learns while the mini-batches go by: the critic, then the actor.

        Neither reads what the other learns, and models that share devices change places once. An early stop ends both
        at one mini-batch, so with `target_kl` they go through them together.
        """
        if self._algorithm.target_kl is not None and train_policy:
            return [{"critic", "actor"}]
        return [{"critic"}, {"actor"}] if train_policy else [{"critic"}]

    async def _epochs(self, batch: Batch, shares: Mapping[int, Share], step: int, learners: set[str]) -> Metrics:
        metrics: Metrics = {}
        for epoch in range(self._algorithm.ppo_epochs):
            for number, minibatch in enumerate(self._minibatches(batch, step, epoch)):
                minibatch = self._trace(minibatch, epoch, number)
                share = sum((shares[key] for key in minibatch.keys), Share(0.0, 0.0, 0.0))
                learned = await self._learn(minibatch, share, learners)
                metrics = merge(metrics, learned)
                if self._moved_too_far(learned):
                    return merge(metrics, {"actor/stopped_by_target_kl": Sum(1)})
        return metrics

    @property
    def _critic_streams(self) -> bool:
        one_update = self._algorithm.ppo_epochs == 1 and self._mini_batch >= self._algorithm.samples_per_step
        return self._streaming and self._critic is not None and one_update

    async def _add_critic_gradient(self, chunk: Batch) -> Metrics:
        """Write the chunk's returns and add the critic's gradient; the whole step's divisor follows."""
        assert self._critic is not None, "asked only with a critic"
        shares, _ = await self._estimate_advantages(chunk)
        if not any(share.value for share in shares.values()):
            return {}
        with self._span("critic/forward_backward"):
            return await self._critic.forward_backward(self._trace(chunk, 0, 0), {})

    def _trace(self, minibatch: Batch, epoch: int, number: int) -> Batch:
        return replace(minibatch, trace=Trace(epoch, number)) if self._traced else minibatch

    def _minibatches(self, batch: Batch, step: int, epoch: int) -> list[Batch]:
        """The batch in an order of its own for this step and epoch, cut into mini-batches; the last may be smaller."""
        order = list(range(len(batch)))
        random.Random(f"{self._seed}/{step}/{epoch}").shuffle(order)
        return [batch.pick(order[i : i + self._mini_batch]) for i in range(0, len(order), self._mini_batch)]

    async def _infer(self, minibatches: list[Batch]) -> Metrics:
        """Old log-probs, reference log-probs, values: of the very mini-batches that are trained on first.

        Cut the same way, a mini-batch gives the same bits with and without gradient, so the first ratio is exactly 1.
        """
        passes = [(self._actor, "actor", "old_logprobs"), (self._reference, "reference", "ref_logprobs")]
        metrics: Metrics = {}
        for model, name, out in [*passes, (self._critic, "critic", "values")]:
            if model is None:
                continue
            with self._span(f"{name}/infer"):
                for minibatch in minibatches:
                    metrics = merge(metrics, await model.infer(minibatch, out))
        return {f"{name}_inferred" if name.endswith("/tokens") else name: m for name, m in metrics.items()}

    async def _estimate_advantages(self, batch: Batch) -> tuple[dict[int, Share], Estimate]:
        """Write advantages, returns and weights; give each sample's share of the divisors."""
        columns = await self._columns(batch)
        estimated = estimate(columns, self._algorithm, self._loss_fn, self._kl_coefficient)
        layout = columns.layout(estimated.trained_NT)
        shape = columns.mask_NT.shape
        policy = averaging_weights(layout, AVERAGES[self._loss_fn.loss_aggregation], fixed_length=self._max_new_tokens)
        value = averaging_weights(layout, "token_mean")
        correct_NT = estimated.trained_NT & (columns.reward_N > 0)[:, None]
        out = {
            "advantages": estimated.advantages_NT,
            "weights": policy.weights_P.view(shape),
            "nll_weights": correct_NT.float(),
        }
        if estimated.returns_NT is not None:
            out |= {"returns": estimated.returns_NT, "value_weights": value.weights_P.view(shape)}
        rows = {name: [row[:n] for row, n in zip(x_NT, batch.lengths, strict=True)] for name, x_NT in out.items()}
        await self._plane.put(batch.keys, rows)
        parts = zip(policy.shares_N.tolist(), value.shares_N.tolist(), correct_NT.sum(1).tolist(), strict=True)
        return dict(zip(batch.keys, (Share(*part) for part in parts), strict=True)), estimated

    async def _columns(self, batch: Batch) -> Columns:
        parts = [f"reward/{name}" for name in batch.components]
        names = ["mask", "reward", "truncated", "trained", "gen_logprobs", "old_logprobs", *parts]
        names += ["ref_logprobs"] * (self._reference is not None) + ["values"] * (self._critic is not None)
        names += [VALUE_AFTER] * self._bootstraps
        rows = await self._plane.get(batch.keys, names)
        scalar = {name: torch.stack(rows[name]) for name in names if rows[name][0].dim() == 0}
        padded = {name: pad_sequence(rows[name], batch_first=True) for name in names if name not in scalar}
        truncated_N = scalar["truncated"]
        return Columns(
            reward_N=scalar["reward"],
            components={name: scalar[f"reward/{name}"] for name in batch.components},
            truncated_N=truncated_N,
            trained_N=scalar["trained"],
            group_N=torch.tensor(batch.groups),
            mask_NT=padded["mask"],
            gen_logprobs_NT=padded["gen_logprobs"],
            old_logprobs_NT=padded["old_logprobs"],
            ref_logprobs_NT=padded.get("ref_logprobs"),
            values_NT=padded.get("values"),
            bootstrap_N=torch.where(truncated_N, scalar[VALUE_AFTER], 0.0) if self._bootstraps else None,
        )

    @property
    def _bootstraps(self) -> bool:
        estimator = self._algorithm.adv_estimator
        return isinstance(estimator, Gae) and estimator.bootstrap_truncated

    async def _learn(self, minibatch: Batch, share: Share, learners: set[str]) -> Metrics:
        """One optimizer step of each model, critic first. A mini-batch without a token to learn from is passed over."""
        metrics: Metrics = {}
        if "critic" in learners and self._critic is not None and share.value > 0:
            if not self._critic_streams:
                metrics = merge(metrics, await self._gradient("critic", self._critic, minibatch, {}))
            metrics = merge(metrics, await self._optim_step("critic", self._critic, share.value))
        if "actor" in learners and share.policy > 0:
            metrics = merge(metrics, await self._gradient("actor", self._actor, minibatch, self._scale(share)))
            metrics = merge(metrics, await self._optim_step("actor", self._actor, share.policy))
        if "actor" in learners and share.policy == 0:
            metrics["advantages/empty_minibatches"] = Sum(1)
        return metrics

    def _scale(self, share: Share) -> dict[str, float]:
        """Auxiliary terms have divisors of their own: scaled so that the common division gives theirs."""
        base = self._loss_fn.reference_policy_kl_penalty
        return {
            "nll": share.policy / share.nll if share.nll else 0.0,
            "kl": self._kl_coefficient / base if base else 0.0,
        }

    async def _gradient(self, name: str, model: Trainer, minibatch: Batch, scale: Mapping[str, float]) -> Metrics:
        with self._span(f"{name}/forward_backward"):
            return await model.forward_backward(minibatch, scale)

    async def _optim_step(self, name: str, model: Trainer, divisor: float) -> Metrics:
        with self._span(f"{name}/optim_step"):
            return await model.optim_step(divisor)

    def _moved_too_far(self, learned: Metrics) -> bool:
        moved = learned.get("actor/approx_kl")
        return moved is not None and exceeds_target_kl(moved.value, self._algorithm.target_kl)

    def _adapt_kl(self, estimated: Estimate, samples: int) -> None:
        """The next step's coefficient, from the divergence that this batch was sampled at."""
        if (adaptive := self._loss_fn.adaptive_kl) is None or estimated.kl is None:
            return
        state = AdaptiveKl(self._kl_coefficient, adaptive.target, adaptive.horizon)
        self._kl_coefficient = update_kl(state, estimated.kl, samples).coefficient

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps beside the models."""
        return {"kl_coefficient": self._kl_coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        self._kl_coefficient = state["kl_coefficient"]
