"""What a transformers engine takes: weights by Hugging Face name, and the models whose law it can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from tandem.roles import NamedTensors, WeightStream
from tandem.rollout.attention import NAME

Named = tuple[str, torch.Tensor]


def load_weights(model: PreTrainedModel, weights: NamedTensors) -> None:
    """Copy weights in place, cast to the model's precision. Nothing is changed when any name or shape is wrong.

    Tied weights have one name, the first: a tied model takes no lm_head.weight.
    """
    wanted = dict(model.named_parameters())
    checked = check_weights({name: tuple(parameter.shape) for name, parameter in wanted.items()}, weights)
    with torch.no_grad():
        for name, tensor in checked:
            wanted[name].copy_(tensor)
            del tensor  # of a stream: before the next bucket comes


def check_weights(wanted: Mapping[str, Sequence[int]], weights: NamedTensors) -> WeightStream | list[Named]:
    """The same weights, when they are all that is `wanted` (name -> shape). A stream is not begun for that.

    Else all of them are held, since names must be known before the first is taken: a caller must not reuse a tensor's
    memory. Raises ValueError naming the first weight which comes twice, is unknown, missing or of another shape.
    """
    if isinstance(weights, WeightStream):
        check_shapes(wanted, weights.shapes)
        return weights
    held = list(weights)
    check_shapes(wanted, [(name, tuple(tensor.shape)) for name, tensor in held])
    return held


def check_shapes(wanted: Mapping[str, Sequence[int]], given: Sequence[tuple[str, Sequence[int]]]) -> None:
    """See check_weights."""
    shapes: dict[str, list[int]] = {}
    for name, shape in given:
        if name in shapes:
            raise ValueError(f"weight {name!r} came twice")
        shapes[name] = list(shape)
    unknown = [name for name in shapes if name not in wanted]
    if unknown:
        tied = " (the model ties it to its embedding)" if unknown[0] == "lm_head.weight" else ""
        raise ValueError(f"{len(unknown)} weights are unknown to the engine's model, first {unknown[0]!r}{tied}")
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ValueError(f"{len(missing)} of {len(wanted)} weights are missing, first {missing[0]!r}")
    for name, shape in wanted.items():
        if shapes[name] != list(shape):
            raise ValueError(f"weight {name!r} has shape {shapes[name]}, want {list(shape)}")


def refuse_unsupported(model: PreTrainedModel, max_total_sequence_length: int) -> None:
    """The engine's mask is causal over the whole sequence, its cache is keys and values: nothing else runs."""
    config = model.config.get_text_config()
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() before an engine takes it")
    attention = config._attn_implementation
    if attention not in ("sdpa", NAME):  # a model that runs sdpa runs our attention: no soft caps, no sinks
        raise ValueError(f"attn_implementation is {attention!r}; load the model with attn_implementation='sdpa'")
    # Not every config has these two: absent means full attention.
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_total_sequence_length:
        kinds.add(f"sliding window of {window} < max_total_sequence_length {max_total_sequence_length}")
    elif window is not None:
        kinds.discard("sliding_attention")
    other = sorted(kinds - {"full_attention"})
    if other:
        raise ValueError(
            f"{type(model).__name__} has layers of {', '.join(other)}; the engine knows full attention only"
        )
