"""What Megatron-Core's layers call for attention: the torch backend's kernels, inside the sequences of a pack."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tandem.train.torch.attention import Layout, packed_attention


@dataclass(frozen=True)
class Packed:
    """Travels through Megatron-Core's layers in the place of its PackedSeqParams, of which they read the format.

    They take the pack for one long sequence: angles come token by token, and attention alone knows the borders.
    """

    layout: Layout
    qkv_format: str = "sbhd"


class PackedAttention(nn.Module):
    """Between the two linear maps of SelfAttention: [L, 1, heads, D] -> [L, 1, heads x D]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        windows: tuple[int | None, ...],
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._window = windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None,
        packed_seq_params: Packed,
    ) -> Tensor:
        """Causal inside each sequence. Ranks that share a pack gather its keys and values."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended, _ = packed_attention(
            self,
            query,
            key,
            value,
            None,
            layout=packed_seq_params.layout,
            scaling=self._scale,
            sliding_window=self._window,
        )
        return attended.transpose(0, 1).flatten(2)
