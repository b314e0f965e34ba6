"""The torch backend: packing, threads, precision, weights on disk, refusals."""

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from tandem.train.heads import TokenLogprobs
from tandem.train.torch.attention import lay_out
from tandem.train.torch.backend import build_torch_backend, choose_kernel
from tandem.types import Mean
from tests.train.small_models import (
    CPU,
    SHAPE,
    actor_backend,
    critic_backend,
    gradients,
    lengths_of,
    llama,
    qwen,
    rows,
    settings,
)
from tests.train.small_models import packs_of as cut

LENGTHS = lengths_of(8)
COLUMNS = {name: column for name, column in rows(LENGTHS).items() if name in ("tokens", "mask")}


def packs_of(lengths=LENGTHS, columns=COLUMNS, budget=256):
    return cut(lengths, columns, budget)


def infer(backend, packs):
    """One column a pack."""
    return [output.column_P for output in backend.infer(packs)]


def likelihood(output, pack):
    total = torch.where(pack.mask_P, -output.column_P, 0.0).sum()
    return total, {"loss": Mean(float(total.detach()), 1)}


def spoiled(output, pack):
    return output.column_P.sum() * float("nan"), {"loss": Mean(float("nan"), 1)}


def learn(backend, steps=1, loss=likelihood):
    for _ in range(steps):
        backend.forward_backward(packs_of(), loss)
        report = backend.optim_step(100.0)
    return report


@pytest.mark.parametrize("build", [llama, lambda: llama(tied=False), qwen], ids=["llama", "untied", "qwen2"])
def test_packed_logprobs_equal_transformers_on_each_row_alone(build):
    plain = build().eval()
    wanted = []
    with torch.no_grad():
        for tokens, mask in zip(COLUMNS["tokens"], COLUMNS["mask"], strict=True):
            logprobs = (plain(input_ids=tokens[None]).logits[0] / 0.7).log_softmax(-1)
            own = torch.cat([torch.zeros(1), logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)])
            wanted.append(torch.where(mask, own, 0.0))
    packs = packs_of()
    assert len(packs[0].keys) > 1
    backend = actor_backend(build(), temperature=0.7)
    for pack, column in zip(packs, infer(backend, packs), strict=True):
        expected = torch.cat([wanted[row] for row in pack.rows])
        torch.testing.assert_close(column[: pack.tokens], expected, rtol=1e-5, atol=1e-5)
        assert not column[pack.tokens :].any()


def test_a_sliding_window_is_kept_inside_each_row():
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    plain = qwen(**window).eval()
    backend = actor_backend(qwen(**window))
    packs = packs_of()
    found = torch.cat([column[: pack.tokens] for pack, column in zip(packs, infer(backend, packs), strict=True)])
    tokens = COLUMNS["tokens"][packs[0].rows[0]]
    with torch.no_grad():
        logprobs = plain(input_ids=tokens[None]).logits[0].log_softmax(-1)
    own = logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)
    mask = COLUMNS["mask"][packs[0].rows[0]][1:]
    torch.testing.assert_close(found[1 : len(tokens)][mask], own[mask], rtol=1e-5, atol=1e-5)


def test_values_stand_at_the_state_before_their_token():
    backend = critic_backend()
    head = backend.head.linear.weight.detach().clone()
    plain = llama().eval()
    packs = packs_of()
    output = next(backend.infer(packs))
    tokens = COLUMNS["tokens"][packs[0].rows[0]]
    with torch.no_grad():
        after = (plain.model(input_ids=tokens[None]).last_hidden_state[0] @ head.t()).squeeze(1)
    assert output.column_P[0] == 0
    torch.testing.assert_close(output.column_P[1 : len(tokens)], after[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.after_P[: len(tokens)], after, rtol=1e-5, atol=1e-5)


def test_a_new_critic_says_0_or_the_middle_of_its_bins():
    for support, start in ((None, 0.0), ((-1.0, 3.0, 11), 1.0)):
        packs = packs_of()
        values = infer(critic_backend(support=support, zero=True), packs)[0]
        seen = packs[0].positions_P > 0
        assert torch.allclose(values[seen], torch.tensor(start))
        assert not values[~seen].any()


@pytest.mark.parametrize("build", [actor_backend, critic_backend, lambda: critic_backend(support=(0.0, 1.0, 21))])
def test_results_have_the_same_bits_however_rows_are_packed(build):
    backend = build()
    found = []
    for budget in (1, 48, 100, 1000):
        packs = packs_of(budget=budget)
        by_row = {}
        for pack, column in zip(packs, infer(backend, packs), strict=True):
            by_row |= dict(zip(pack.rows, column[: pack.tokens].split(pack.lengths), strict=True))
        found.append(torch.cat([by_row[row] for row in range(len(LENGTHS))]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    "build", [actor_backend, critic_backend, lambda: actor_backend(qwen())], ids=["actor", "critic", "qwen2"]
)
def test_one_step_has_the_same_bits_with_one_thread_and_with_two(build):
    lengths = [200] * 4  # 800 x 64 numbers: more than the 32,768 from which torch shares a sum between threads
    columns = {name: column for name, column in rows(lengths).items() if name in ("tokens", "mask")}
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        backend = build()
        for _ in range(2):
            backend.forward_backward(packs_of(lengths, columns, 4096), likelihood)
            backend.optim_step(1000.0)
        found.append({name: p.detach().clone() for name, p in backend.parameters.items()})
    different = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    assert different == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(mode, precision):
    found = []
    for checkpointing in ("none", mode):
        backend = actor_backend(config=settings(activation_checkpointing=checkpointing, precision=precision))
        backend.forward_backward(packs_of(), likelihood)
        found.append(gradients(backend))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_every_parameter_has_a_gradient_even_when_nothing_is_asked():
    columns = COLUMNS | {"mask": [torch.zeros_like(mask) for mask in COLUMNS["mask"]]}
    backend = actor_backend()
    backend.forward_backward(packs_of(columns=columns), likelihood)
    found = gradients(backend)
    assert set(found) == set(backend.parameters)
    assert not any(gradient.any() for gradient in found.values())


def test_bfloat16_learns_and_keeps_float32_weights():
    backend = actor_backend(config=settings(precision="bfloat16"))
    packs = packs_of()
    before = infer(backend, packs)[0]
    learn(backend, 5)
    after = infer(backend, packs)[0]
    assert after.sum() > before.sum()
    assert after.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in backend.parameters.values())
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in backend.export_weights())


def test_export_gives_hugging_face_names_and_tied_weights_once():
    tied = dict(actor_backend(llama()).export_weights())
    assert "model.embed_tokens.weight" in tied
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in dict(actor_backend(llama(tied=False)).export_weights())
    critic = dict(critic_backend().export_weights())
    assert "value_head.linear.weight" in critic
    assert set(critic) - set(tied) == {"value_head.linear.weight"}


@pytest.mark.parametrize("build", [actor_backend, critic_backend])
def test_save_and_load_continue_to_the_bit(build, tmp_path):
    schedule = settings(scheduler={"name": "cosine", "warmup_steps": 1})
    unbroken = build(config=schedule)
    learn(unbroken, 2)
    unbroken.snapshot(copy=False)(tmp_path)
    resumed = build(config=schedule)
    resumed.load(tmp_path)
    reports = learn(unbroken, 3), learn(resumed, 3)
    assert reports[0] == reports[1]
    assert all(torch.equal(p, resumed.parameters[name]) for name, p in unbroken.parameters.items())


def test_another_architecture_is_refused_with_the_first_tensor_that_differs(tmp_path):
    actor_backend(llama()).snapshot(copy=False)(tmp_path)
    with pytest.raises(ValueError, match=r"q_proj.bias is missing there"):
        actor_backend(qwen()).load(tmp_path)
    with pytest.raises(ValueError, match=r"value_head.linear.weight is missing there"):
        critic_backend().load(tmp_path)


def test_nan_refuses_the_step_and_touches_nothing():
    backend = actor_backend()
    learn(backend)
    before = {name: p.detach().clone() for name, p in backend.parameters.items()}
    backend.forward_backward(packs_of(), likelihood)
    report = learn(backend, loss=spoiled)
    assert report.refused
    assert report.refusals_left == 2
    assert gradients(backend) == {}
    assert all(torch.equal(p, before[name]) for name, p in backend.parameters.items())
    assert not learn(backend).refused


def test_an_infinite_loss_with_a_finite_gradient_refuses_too():
    backend = actor_backend()
    report = learn(backend, loss=lambda o, p: (likelihood(o, p)[0] + float("inf"), {"loss": Mean(1.0, 1)}))
    assert report.refused


def test_a_frozen_model_infers_and_refuses_to_step():
    model = llama()
    head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=32)
    backend = build_torch_backend(model, head, settings(), total_optimizer_steps=None, device=CPU)
    packs = packs_of()
    assert infer(backend, packs)[0].any()
    assert not any(p.requires_grad for p in backend.parameters.values())
    with pytest.raises(RuntimeError, match="frozen"):
        backend.optim_step(1.0)


def test_models_that_do_more_to_their_scores_are_refused():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=50.0))
    head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=32)
    with pytest.raises(ValueError, match="caps its attention scores"):
        build_torch_backend(model, head, settings(), total_optimizer_steps=1, device=CPU)
    capped = Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=0.5)
    model = Gemma2ForCausalLM(capped)
    head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=32)
    with pytest.raises(ValueError, match="more to its logits"):
        build_torch_backend(model, head, settings(), total_optimizer_steps=1, device=CPU)


def test_an_output_layer_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="without bias"):
        TokenLogprobs(nn.Linear(4, 4), temperature=1.0, chunk_size=16)


def test_the_kernel_follows_device_and_precision():
    gpu = torch.device("cuda")
    assert choose_kernel(settings(), CPU) == "sdpa"
    assert choose_kernel(settings(), gpu) == "sdpa"
    assert choose_kernel(settings(precision="bfloat16"), gpu) in ("varlen", "varlen_cudnn")
    with pytest.raises(ValueError, match="needs a GPU and bfloat16"):
        choose_kernel(settings(attention="varlen"), CPU)


def test_a_layout_covers_every_token_once():
    pack = packs_of()[0]
    layout = lay_out(pack, CPU, "sdpa")
    assert torch.equal(layout.source_S[layout.slot_P], torch.arange(len(pack.tokens_P)))
    assert torch.equal(layout.is_filled_S.nonzero().squeeze(1), layout.slot_P.sort().values)
