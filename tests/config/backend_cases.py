"""Cases of the rules about training backends; see rule_cases.py."""

from tests.config.cluster_cases import RAY
from tests.config.rule_cases import PPO

EIGHT = "tensor_model_parallel_size:8,sequence_parallel:true"

CASES = [
    (
        "token_parts",
        PPO,
        f"{RAY} cluster.gpus_per_node=32 value.backend={{name:megatron,{EIGHT},context_parallel_size:4}}",
        "value.sequence_packing.make_sequence_length_divisible_by=32",
        "value.backend.tensor_model_parallel_size = 8|value.backend.context_parallel_size = 4|divisible_by=32",
    ),
    (
        "layers_on_ranks",
        PPO,
        f"{RAY} cluster.gpus_per_node=3 value.backend={{name:megatron,pipeline_model_parallel_size:2}}",
        "cluster.gpus_per_node=4",
        "value.backend.pipeline_model_parallel_size = 2|3 ranks of the critic|cluster.gpus_per_node = 3",
    ),
    (
        "gradient_precision",
        PPO,
        "value.backend={name:megatron,grad_reduce_in_fp32:false}",
        "value.precision=bfloat16",
        "value.backend.grad_reduce_in_fp32 = false|value.precision = float32",
    ),
    (
        "of_torch_alone",
        PPO,
        "value.backend.name=megatron value.activation_checkpointing=selective",
        "value.activation_checkpointing=full",
        "value.activation_checkpointing = selective|value.backend.name = megatron",
    ),
]
