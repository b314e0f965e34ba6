"""One pipeline stage of a decoder, from Megatron-Core's parts: embedding, layers, last norm, and our head on top."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from tandem.train.backend import Output, Pack
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.logprobs import VocabularyPart
from tandem.train.megatron.attention import Packed, PackedAttention
from tandem.train.megatron.grid import Grid
from tandem.train.megatron.versions import mlp_of


class RmsNorm(nn.Module):
    """Megatron-Core's torch norm refuses sequence parallel. This one marks its weight, so that it is added up."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        set_on(self.weight, sequence_parallel=config.sequence_parallel)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self._eps)


def set_on(parameter: Tensor, **marks: object) -> None:
    """Megatron-Core reads what a parameter needs from attributes of it."""
    for name, mark in marks.items():
        setattr(parameter, name, mark)


def local_layer(config: TransformerConfig, windows: tuple[int | None, ...]) -> ModuleSpec:
    """A layer without TransformerEngine: torch's fused norms and attention kernels, Megatron-Core's linear maps."""
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(PackedAttention, windows=windows),
        linear_proj=RowParallelLinear,
        q_layernorm=RmsNorm if config.qk_layernorm else IdentityOp,
        k_layernorm=RmsNorm if config.qk_layernorm else IdentityOp,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=mlp_of(mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


class Stage(MegatronModule):
    """What one pipeline rank holds: `layers` of the decoder's. `head` stands on the last one."""

    def __init__(
        self,
        config: TransformerConfig,
        grid: Grid,
        layer: ModuleSpec,
        head: TokenLogprobs | ValueHead,
        *,
        layers: int,
        vocabulary: int,
        inverse_frequencies: Tensor,
        tied: bool,
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vp_stage = grid.is_first, grid.is_last, None
        self.share_embeddings_and_output_weights = tied
        self._grid = grid
        self._inverse_frequencies = inverse_frequencies
        if self.pre_process:
            self.embedding = VocabParallelEmbedding(
                vocabulary, config.hidden_size, init_method=nn.init.zeros_, config=config, tp_group=grid.groups.tp
            )
        spec = TransformerBlockSubmodules([layer] * layers, layer_norm=RmsNorm)
        self.decoder = TransformerBlock(
            config, spec, pre_process=self.pre_process, post_process=self.post_process, pg_collection=grid.groups
        )
        if self.post_process:
            self.head = self._cut(head, vocabulary)
        if tied and grid.stages > 1 and (self.pre_process or self.post_process):
            set_on(self.shared_embedding_or_output_weight(), shared_embedding=True, shared=not self.pre_process)

    def _cut(self, head: TokenLogprobs | ValueHead, vocabulary: int) -> TokenLogprobs | ValueHead:
        """A value head stays whole. Of an output layer, this rank has the rows of its tokens."""
        if isinstance(head, ValueHead):
            return head
        group = self._grid.groups.tp
        rows = vocabulary // group.size()
        output = nn.Linear(self.config.hidden_size, rows, bias=False, device="meta")
        if self.share_embeddings_and_output_weights and self.pre_process:
            output.weight = self.embedding.weight
        else:
            output.weight = nn.Parameter(torch.empty(rows, self.config.hidden_size, dtype=self.config.params_dtype))
        part = VocabularyPart(group.rank() * rows, group) if group.size() > 1 else None
        return head.on(output, part)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The one of the two that is here; asked where they are tied."""
        if self.pre_process:
            return self.embedding.weight
        assert isinstance(self.head, TokenLogprobs), "a value head is not tied"
        return self.head.lm_head.weight

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        """What came from the stage before."""
        self.decoder.set_input_tensor(tensors[0])

    def forward(self, pack: Pack, packed: Packed) -> Tensor | Output:
        """Hidden states [L, 1, H] for the next stage; on the last one, the head's word on every token of the pack."""
        context = self._grid.context
        part = slice(None) if context is None else context.part(len(pack.tokens_P))
        hidden = None
        if self.pre_process:
            hidden = self.embedding(pack.tokens_P[None, part]).transpose(0, 1).contiguous()
            if self.config.sequence_parallel:
                hidden = scatter_to_sequence_parallel_region(hidden, group=self._grid.groups.tp)
        angles_LD = pack.positions_P[part].float()[:, None] * self._inverse_frequencies
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles_LD, angles_LD], dim=-1)[:, None, None],
            packed_seq_params=packed,
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:  # the head's gradient is whole on every tensor rank: each takes its tokens'
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._grid.groups.tp
            )
        return self.head(hidden.squeeze(1), pack, context)
