"""bfloat16 passes over float32 weights: one cast a step, sums in float32, nothing stale."""

import torch

from tandem.train.heads import TokenLogprobs
from tandem.train.torch.backend import build_torch_backend
from tandem.types import Mean
from tests.train.small_models import (
    CPU,
    actor_backend,
    critic_backend,
    gradients,
    lengths_of,
    llama,
    packs_of,
    rows,
    settings,
)

LENGTHS = lengths_of(8)
COLUMNS = {name: column for name, column in rows(LENGTHS).items() if name in ("tokens", "mask")}
PACKS = packs_of(LENGTHS, COLUMNS, 64)


def likelihood(output, pack):
    return torch.where(pack.mask_P, -output.column_P, 0.0).sum(), {"loss": Mean(0.0, 1)}


def half(build=actor_backend):
    return build(config=settings(precision="bfloat16"))


def infer(backend):
    return torch.cat([output.column_P for output in backend.infer(PACKS)])


def test_gradients_of_micro_batches_are_added_in_float32():
    parts = []
    for pack in PACKS:
        alone = half()
        alone.forward_backward([pack], likelihood)
        parts.append(gradients(alone))
    together = half()
    together.forward_backward(PACKS, likelihood)
    for name, gradient in gradients(together).items():
        assert gradient.dtype == torch.float32
        total = parts[0][name]
        for part in parts[1:]:
            total = total + part[name]
        assert torch.equal(gradient, total)
        assert torch.equal(parts[0][name].bfloat16().float(), parts[0][name]), "one micro-batch's is bfloat16"


def test_small_updates_are_not_lost_between_two_bfloat16_numbers():
    backend = actor_backend(config=settings(precision="bfloat16", optimizer={"lr": 1e-5}))
    before = {name: p.detach().clone() for name, p in backend.parameters.items()}
    backend.forward_backward(PACKS, likelihood)
    assert not backend.optim_step(100.0).refused
    changed = backend.parameters["model.layers.0.mlp.up_proj.weight"].detach()
    start = before["model.layers.0.mlp.up_proj.weight"]
    assert ((changed != start).float().mean()) > 0.9
    assert ((changed.bfloat16() != start.bfloat16()).float().mean()) < 0.2


def test_passes_see_weights_that_were_loaded_and_keep_a_value_head_in_float32(tmp_path):
    for build in (actor_backend, critic_backend):
        learned, fresh = half(build), half(build)
        learned.forward_backward(PACKS, likelihood)
        learned.optim_step(100.0)
        learned.snapshot(copy=False)(tmp_path / build.__name__)
        assert not torch.equal(infer(fresh), infer(learned))
        fresh.load_weights(tmp_path / build.__name__)
        assert torch.equal(infer(fresh), infer(learned))
    assert learned.head.linear.weight.dtype == torch.float32


def test_a_frozen_model_keeps_no_float32_weights():
    model = llama()
    head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=32)
    config = settings(precision="bfloat16")
    frozen = build_torch_backend(model, head, config, total_optimizer_steps=None, device=CPU)
    assert {p.dtype for p in frozen.parameters.values()} == {torch.bfloat16}
    assert torch.equal(infer(frozen), infer(half()))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
