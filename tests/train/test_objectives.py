"""Through the whole worker: gradients free of the cut, masked slots free of meaning, first ratios of 1, empty masks."""

import asyncio

import pytest
import torch

from tandem.config.algorithm import HlGaussValueLoss, HuberValueLoss, MseValueLoss, PolicyLoss
from tandem.plane.memory import MemoryPlane
from tandem.train.objectives import PolicyObjective, ValueObjective
from tandem.types import Batch
from tests.train.small_models import actor_backend, batch_of, critic_backend, gradients, lengths_of, rows, worker

LENGTHS = lengths_of(8, low=12)
SCALE = {"nll": 0.6, "kl": 1.0}
EVERYTHING = PolicyLoss.model_validate(
    {
        "importance_sampling_correction": {"name": "tis", "ratio_max": 1.1},
        "reference_policy_kl_penalty": 0.1,
        "positive_example_nll_weight": 0.3,
        "entropy_bonus": 0.05,
        "ratio_clip_c": 3.0,
    }
)
POLICIES = {
    "plain": PolicyLoss(),
    "everything": EVERYTHING,
    "sampler in kl": EVERYTHING.model_copy(update={"use_on_policy_kl_approximation": True}),
    "sequence": PolicyLoss(ratio="sequence", ratio_clip_min=0.01, ratio_clip_max=0.01),
    "on policy": PolicyLoss(ratio="on_policy"),
    "reinforce": PolicyLoss(ratio="none"),
    "cispo": PolicyLoss(use_cispo=True),
}
VALUES = {
    "mse": MseValueLoss(),
    "unclipped": MseValueLoss(cliprange=None, scale=0.5),
    "huber": HuberValueLoss(delta=0.2),
    "hl_gauss": HlGaussValueLoss(num_bins=21),
}
BOTH = [("actor", name) for name in POLICIES] + [("critic", name) for name in VALUES]


def build(kind, name):
    """A backend and its objective."""
    if kind == "actor":
        return actor_backend(), PolicyObjective(POLICIES[name])
    loss = VALUES[name]
    support = (loss.value_min, loss.value_max, loss.num_bins) if isinstance(loss, HlGaussValueLoss) else None
    return critic_backend(support=support), ValueObjective(loss)


def learn(kind, name, columns, parts, *, lengths=LENGTHS, budget=256):
    """Gradients and metrics of a batch that is given in parts."""
    backend, objective = build(kind, name)
    whole = batch_of(lengths)

    async def run():
        plane = MemoryPlane()
        await plane.put(whole.keys, {column: columns[column] for column in objective.columns})
        trainer = worker(backend, plane, objective, budget, name=kind)
        metrics = [await trainer.forward_backward(whole.pick(part), SCALE) for part in parts]
        await trainer.close()
        return metrics

    metrics = asyncio.run(run())
    return gradients(backend), metrics


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_gradients_do_not_depend_on_the_cut(kind, name):
    """Micro-batches of 8, 4, 2, 1 samples; packed or one row a pack; permuted."""
    columns = rows(LENGTHS)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3)).tolist()
    whole, _ = learn(kind, name, columns, [range(8)])
    cuts = [([range(i, i + n) for i in range(0, 8, n)], 256) for n in (4, 2, 1)]
    cuts += [([range(8)], 1), ([order], 256), ([order[:3], order[3:]], 64)]
    scale = max(gradient.abs().max().item() for gradient in whole.values())
    assert scale > 0
    for parts, budget in cuts:
        found, _ = learn(kind, name, columns, parts, budget=budget)
        assert set(found) == set(whole)
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, whole[parameter], rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize(("kind", "name"), BOTH)
@pytest.mark.parametrize("poison", [float("nan"), 1e6])
def test_masked_slots_never_matter_to_the_bit(kind, name, poison):
    clean = rows(LENGTHS)
    poisoned = {
        column: [
            torch.where(mask, x, poison) if x.is_floating_point() else x
            for x, mask in zip(xs, clean["mask"], strict=True)
        ]
        for column, xs in clean.items()
    }
    expected, expected_metrics = learn(kind, name, clean, [range(8)])
    found, metrics = learn(kind, name, poisoned, [range(8)])
    assert metrics == expected_metrics
    assert all(torch.equal(gradient, expected[parameter]) for parameter, gradient in found.items())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_first_ratio_is_exactly_1(temperature):
    """Log-probs of one inference over all, then training in mini-batches under another budget."""
    columns = rows(LENGTHS)
    batch = batch_of(LENGTHS)

    async def run():
        plane = MemoryPlane()
        await plane.put(batch.keys, columns)
        trainer = worker(actor_backend(temperature=temperature), plane, PolicyObjective(PolicyLoss()), budget=100)
        await trainer.infer(batch, "old_logprobs")
        found = [await trainer.forward_backward(batch.pick(part), {}) for part in ([3, 1, 6], [0, 2, 4, 5, 7])]
        await trainer.optim_step(100.0)
        found.append(await trainer.forward_backward(batch, {}))
        await trainer.close()
        return found

    *before, after = asyncio.run(run())
    for metrics in before:
        assert metrics["actor/ratio_min"].value == metrics["actor/ratio_max"].value == 1.0
        assert metrics["actor/clip_fraction"].value == metrics["actor/approx_kl"].value == 0.0
    assert after["actor/ratio_max"].value > 1.0


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_fully_masked_sample_micro_batch_and_batch_are_worth_0(kind, name):
    columns = rows(LENGTHS)
    masked = {column: list(xs) for column, xs in columns.items()}
    for column in ("mask", "weights", "value_weights", "nll_weights"):
        for row in (2, 5):
            masked[column][row] = torch.zeros_like(columns[column][row])
    rest = [0, 1, 3, 4, 6, 7]
    without, _ = learn(kind, name, masked, [rest])
    scale = max(gradient.abs().max().item() for gradient in without.values())
    for parts, budget in (([range(8)], 256), ([range(8)], 1)):
        found, _ = learn(kind, name, masked, parts, budget=budget)
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, without[parameter], rtol=1e-6, atol=1e-6 * scale)
    nothing, [metrics] = learn(kind, name, masked, [[2, 5]])
    assert not any(gradient.any() for gradient in nothing.values())
    assert metrics[f"{kind}/loss"].total == 0.0


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_sample_without_weight_is_out_of_the_loss_and_its_metrics(kind, name):
    columns = rows(LENGTHS)
    weightless = {column: list(xs) for column, xs in columns.items()}
    for column in ("weights", "value_weights", "nll_weights"):
        weightless[column][4] = torch.zeros_like(columns[column][4])
    rest = [0, 1, 2, 3, 5, 6, 7]
    without, [expected] = learn(kind, name, weightless, [rest])
    found, [metrics] = learn(kind, name, weightless, [range(8)])
    scale = max(gradient.abs().max().item() for gradient in without.values())
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, without[parameter], rtol=1e-6, atol=1e-6 * scale)
    for key in set(metrics) - {f"{kind}/{name}" for name in ("tokens", "bytes_read", "pad_fraction", "tflops")}:
        assert metrics[key].value == pytest.approx(expected[key].value, rel=1e-5, abs=1e-6)


def test_only_the_columns_that_a_loss_reads_are_asked_for():
    seen = {name: set(PolicyObjective(config).columns) for name, config in POLICIES.items()}
    base = {"tokens", "mask", "advantages", "weights"}
    assert seen["plain"] == base | {"old_logprobs"}
    assert seen["on policy"] == base
    assert seen["everything"] == base | {"old_logprobs", "gen_logprobs", "ref_logprobs", "nll_weights"}
    assert set(ValueObjective(MseValueLoss()).columns) == {"tokens", "mask", "returns", "value_weights", "values"}
    assert "values" not in ValueObjective(HuberValueLoss()).columns


def test_the_policy_loss_is_the_formula_on_plain_logits():
    """Clip, correction, KL, NLL and entropy, written out over padded rows with transformers' own forward."""
    from tests.train.small_models import llama

    columns = rows(LENGTHS)
    found, _ = learn("actor", "everything", columns, [range(8)])
    model = llama().eval()
    total = torch.zeros(())
    for row in range(8):
        x = {name: xs[row][1:] for name, xs in columns.items()}
        logits = model(input_ids=columns["tokens"][row][None]).logits[0, :-1].log_softmax(-1)
        new = logits.gather(1, x["tokens"][:, None]).squeeze(1)
        ratio = (new - x["old_logprobs"]).exp()
        a = x["advantages"]
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        loss = torch.where(a < 0, torch.minimum(loss, -a * 3.0), loss)
        loss = loss * (x["old_logprobs"] - x["gen_logprobs"]).exp().clamp(0.0, 1.1)
        d = (x["ref_logprobs"] - new).clamp(-20, 20)
        kl = ((new - new.detach()).exp() * (d.exp() - 1 - d)).clamp(-10, 10)
        entropy = -(logits.exp() * logits).sum(-1)
        token = x["weights"] * (loss + 0.1 * kl - 0.05 * entropy) - 0.3 * 0.6 * x["nll_weights"] * new
        total = total + token[x["mask"]].sum()
    total.backward()
    for parameter, gradient in model.named_parameters():
        torch.testing.assert_close(found[parameter], gradient.grad, rtol=1e-4, atol=1e-4)


def test_a_batch_keeps_its_order_through_packs():
    """The rows of `infer` land at their own keys whatever the batch's order is."""
    columns = rows(LENGTHS)
    backend = critic_backend()

    async def run(batch: Batch):
        plane = MemoryPlane()
        await plane.put(batch_of(LENGTHS).keys, columns)
        trainer = worker(backend, plane, None, budget=64, name="critic")
        await trainer.infer(batch, "values")
        await trainer.close()
        return await plane.get(range(8), ["values", "values_after"])

    straight = asyncio.run(run(batch_of(LENGTHS)))
    turned = asyncio.run(run(batch_of(LENGTHS).pick([7, 2, 5, 0, 1, 3, 6, 4])))
    for name in straight:
        assert all(torch.equal(a, b) for a, b in zip(straight[name], turned[name], strict=True))
    assert all(after.dim() == 0 for after in straight["values_after"])
    assert [len(row) for row in straight["values"]] == LENGTHS
