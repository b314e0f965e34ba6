"""A Hugging Face config -> Megatron-Core's."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional
from transformers import PreTrainedConfig

from tandem.config.models import MegatronBackend, TrainedModel
from tandem.train.megatron.names import has_head_norms, has_qkv_bias, head_size

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(c: PreTrainedConfig, config: TrainedModel, sizes: MegatronBackend) -> TransformerConfig:
    """Sums, not averages: `calculate_per_token_loss` leaves gradients alone, and the divisor is applied in the step."""
    dtype, recompute = PRECISIONS[config.precision], config.activation_checkpointing == "full"
    return TransformerConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=head_size(c),
        ffn_hidden_size=c.intermediate_size,
        add_bias_linear=False,
        add_qkv_bias=has_qkv_bias(c),
        qk_layernorm=has_head_norms(c),
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        hidden_dropout=0.0,  # two passes over one batch must agree
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,  # weights are loaded
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.precision == "bfloat16",
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=sizes.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=sizes.num_layers_in_last_pipeline_stage,
        context_parallel_size=sizes.context_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        variable_seq_lengths=True,  # a stage tells the next how long a pack is
        moe_token_dispatcher_type="alltoall",  # which variable lengths ask for, experts or not
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        cuda_graph_scope=[],  # none: the default warns of itself
    )
