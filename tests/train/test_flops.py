"""FLOPs against counts by hand and against products that are really run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from tandem.train.flops import Machine, ModelShape, flops_of, shape_of, speed_metrics, visible_pairs
from tandem.types import Mean, merge
from tests.train.small_models import SHAPE, llama, packs_of, rows

TINY = ModelShape(linear=10, attention_width=4, windows=(None, None), head=6, head_everywhere=False)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_pairs_are_those_of_a_causal_mask(length, window):
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    assert visible_pairs(length, window) == int(seen.sum())


def test_a_count_by_hand():
    # Two layers. Linear: 2 x 10 x 5 tokens. Attention: 4 x 4 x (6 + 3 pairs). Head: 2 x 6 on 4 tokens.
    assert TINY.forward([3, 2], 4) == 2 * (100 + 16 * 9) + 48
    assert TINY.forward_backward([3, 2], 4) == 3 * TINY.forward([3, 2], 4)


def test_the_shape_of_a_model_is_that_of_its_linear_maps():
    shape = shape_of(LlamaConfig(**SHAPE), 96, head_everywhere=False)
    layer = llama().model.layers[0]
    assert shape.linear == sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
    assert (shape.attention_width, shape.windows, shape.head) == (64, (None, None), 96 * 64)
    window = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert shape_of(window, 96, head_everywhere=False).windows == (None, 7)
    assert shape_of(GPT2Config(), 96, head_everywhere=False) is None


def test_torch_counts_as_many_but_for_the_masked_half_of_attention():
    model, length = llama().eval(), 24
    model.set_attn_implementation("eager")  # the counter does not know the fused kernel of a CPU
    shape = shape_of(model.config, 96, head_everywhere=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    masked = 2 * 4 * shape.attention_width * (length**2 - visible_pairs(length, None))
    assert shape.forward([length], length) + masked == counter.get_total_flops()


def test_padding_is_no_work_and_the_head_works_where_it_is_asked():
    lengths = [9, 12]
    columns = rows(lengths)
    packs = packs_of(lengths, columns, 64)
    written = sum(int(mask.sum()) for mask in columns["mask"])
    assert flops_of(TINY, packs, backward=False) == TINY.forward(lengths, written)
    critic = ModelShape(10, 4, (None,), head=1, head_everywhere=True)
    assert flops_of(critic, packs, backward=True) == critic.forward_backward(lengths, 21)


def test_rates_merge_to_the_rate_of_the_whole():
    machine = Machine(TINY, peak_tflops=100.0)
    found = merge(speed_metrics(machine, 30.0, 1.0), speed_metrics(machine, 30.0, 2.0))
    assert (found["tflops"].value, found["mfu"].value) == (20.0, pytest.approx(0.2))
    assert speed_metrics(Machine(TINY, None), 30.0, 1.0) == {"tflops": Mean(30.0, 1.0)}
