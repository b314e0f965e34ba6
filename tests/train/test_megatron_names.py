"""The name table: it covers a model's tensors and every number of ours, and refuses what is not in it. No Megatron."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tandem.config.models import MegatronBackend
from tandem.train.megatron.names import check_model, layers_of_stages, name_table
from tests.train.small_models import SHAPE
from tests.train.updates import MODELS


def sizes(**changes: object) -> MegatronBackend:
    return MegatronBackend(name="megatron", **changes)


def table(model: PreTrainedModel, stages: int, *, value: bool = False):
    c = model.config
    layers = layers_of_stages(c.num_hidden_layers, sizes(pipeline_model_parallel_size=stages))
    tied = bool(c.tie_word_embeddings) and not value
    return name_table(c, layers, outputs=1 if value else c.vocab_size, value=value, tied=tied)


@pytest.mark.parametrize("name", ["llama", "untied", "qwen2", "qwen3"])
def test_the_table_has_the_models_tensors_with_their_shapes(name: str):
    model = MODELS[name]()
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {row.name: row.shape for row in table(model, 2)} == wanted
    critic = {row.name: row.shape for row in table(model, 2, value=True)}
    wanted.pop("lm_head.weight", None)
    assert critic == wanted | {"value_head.linear.weight": (1, SHAPE["hidden_size"])}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["llama", "untied", "qwen2", "qwen3"])
def test_every_number_of_ours_is_one_of_theirs(name: str, parts: int):
    model = MODELS[name]()
    theirs, rows = dict(model.named_parameters()), table(model, 1)
    numbers: dict[str, int] = {}  # how many each of our parameters has on one rank
    for row in rows:
        shape = row.part_shape(parts)
        numbers[row.homes[0][1]] = numbers.get(row.homes[0][1], 0) + torch.Size(shape).numel()
    for part in range(parts):
        ours = {}
        for row in rows:
            _, place = row.homes[0]
            width = 1 if len(row.shape) == 1 else row.part_shape(parts)[1]
            shape = (numbers[place],) if len(row.shape) == 1 else (numbers[place] // width, width)
            ours.setdefault(place, torch.full(shape, torch.nan))
            view = row.view(ours[place])
            view.copy_(theirs[row.name].detach()[row.region(part, parts)].reshape(view.shape))
        assert not any(tensor.isnan().any() for tensor in ours.values())
        for row in rows:
            found = row.view(ours[row.homes[0][1]]).reshape(row.part_shape(parts))
            assert torch.equal(found, theirs[row.name].detach()[row.region(part, parts)]), row.name


def test_a_tied_embedding_has_two_homes_on_two_stages():
    (embedding, *_) = table(MODELS["llama"](), 2)
    assert embedding.homes == ((0, "embedding.weight"), (1, "head.lm_head.weight"))
    (embedding, *_) = table(MODELS["llama"](), 1)
    assert embedding.homes == ((0, "embedding.weight"),)


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [(None, None, (7, 7, 7, 7)), (4, None, (4, 8, 8, 8)), (None, 1, (9, 9, 9, 1)), (6, 4, (6, 9, 9, 4))],
)
def test_layers_are_shared_out(first: int | None, last: int | None, wanted: tuple[int, ...]):
    changes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    assert layers_of_stages(28, sizes(pipeline_model_parallel_size=4, **changes)) == wanted


@pytest.mark.parametrize(("first", "last"), [(5, None), (28, None), (14, 14), (None, None)])
def test_layers_that_cannot_be_shared_out_are_refused(first: int | None, last: int | None):
    changes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    stages = 5 if first is None else 4
    with pytest.raises(ValueError, match=f"pipeline_model_parallel_size={stages} .* cannot share out .* 28 layers"):
        layers_of_stages(28, sizes(pipeline_model_parallel_size=stages, **changes))


def llama_with(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))


def experts() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, num_experts=2, moe_intermediate_size=16))


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (experts, r"this model is qwen3_moe: experts \(MoE\) are not supported yet; set backend.name=torch"),
        (lambda: llama_with(attention_bias=True), "has no attention_bias"),
        (lambda: llama_with(mlp_bias=True), "has no mlp_bias"),
        (lambda: llama_with(hidden_act="gelu"), "knows hidden_act=silu, not gelu"),
        (lambda: llama_with(rope_parameters=YARN), "knows the RoPE types default, linear, llama3, not yarn"),
    ],
)
def test_what_is_not_in_the_table_is_refused_by_name(build, names: str):
    with pytest.raises(ValueError, match=names):
        check_model(build(), sizes())


def test_sizes_that_tensor_ranks_cannot_share_are_refused():
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    check_model(model, sizes(tensor_model_parallel_size=2))
    with pytest.raises(ValueError, match="tensor_model_parallel_size=4 does not divide the model's num_key_value_head"):
        check_model(model, sizes(tensor_model_parallel_size=4))
