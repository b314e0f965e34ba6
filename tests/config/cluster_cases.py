"""More of rule_cases: configs that break the rules of machines, and of how models are laid on them."""

from tests.config.rule_cases import PPO

RAY = "cluster.launch=ray"
ENGINES = "policy.generation.colocated"
ENGINE = "policy.generation.engine"

# rule, recipe, overrides that break it, overrides after them that mend it, what the message names
CASES = [
    (
        "compiled_layers",
        PPO,
        "cluster.launch=ray cluster.gpus_per_node=2 value.compile=true value.parallel.context_parallel_size=2",
        "value.compile=auto",
        "value.compile = true|value.parallel.context_parallel_size = 2",
    ),
    (
        "token_parts",
        PPO,
        f"{RAY} cluster.gpus_per_node=3 value.parallel={{tensor_parallel_size:3,sequence_parallel:true}}",
        "value.sequence_packing.make_sequence_length_divisible_by=3",
        "tensor_parallel_size = 3|sequence_parallel = true|make_sequence_length_divisible_by = 1|divisible_by=3",
    ),
    (
        "token_parts",
        PPO,
        f"{RAY} cluster.gpus_per_node=32 policy.parallel="
        "{tensor_parallel_size:4,sequence_parallel:true,context_parallel_size:8}",
        "policy.sequence_packing.make_sequence_length_divisible_by=32",
        "context_parallel_size = 8|tensor_parallel_size = 4|make_sequence_length_divisible_by = 1|divisible_by=32",
    ),
    (
        "plane_within_reach",
        PPO,
        f"{RAY} data_plane.name=memory",
        "data_plane=null",
        "data_plane.name = memory|cluster.launch = ray|transfer_queue",
    ),
    ("own_gpus", PPO, f"{ENGINES}.enabled=false", f"{ENGINES}.enabled=true", f"{ENGINES}.enabled = false|launch=ray"),
    (
        "own_gpus",
        PPO,
        f"{RAY} {ENGINES}.enabled=false",
        "cluster.gpus_per_node=2",
        f"{ENGINES}.resources (1 x 1 GPUs)|cluster.num_nodes = 1|cluster.gpus_per_node = 1",
    ),
    (
        "own_gpus",
        PPO,
        f"{RAY} cluster.gpus_per_node=2 {ENGINES}.enabled=false value.colocated.enabled=false",
        "cluster.gpus_per_node=3",
        f"{ENGINES}.resources (1 x 1 GPUs) and value.colocated.resources (1 x 1 GPUs)|gpus_per_node = 2",
    ),
    (
        "layers_on_ranks",
        PPO,
        f"{RAY} cluster.gpus_per_node=3 value.parallel.tensor_parallel_size=2",
        "cluster.gpus_per_node=4",
        "value.parallel.tensor_parallel_size = 2|3 ranks of the critic|cluster.gpus_per_node = 3",
    ),
    (
        "layers_on_ranks",
        PPO,
        f"{RAY} cluster.gpus_per_node=2 policy.parallel.tensor_parallel_size=2 policy.parallel.context_parallel_size=2",
        "cluster.gpus_per_node=4",
        "policy.parallel.tensor_parallel_size = 2|policy.parallel.context_parallel_size = 2|2 ranks of the actor",
    ),
    (
        "engines_on_slots",
        PPO,
        f"{RAY} cluster.gpus_per_node=2 {ENGINE}={{name:vllm,tensor_parallel_size:2}}",
        f"cluster.gpus_per_node=3 {ENGINES}={{enabled:false,resources:{{gpus_per_node:2}}}}",
        f"{ENGINE}.tensor_parallel_size = 2|{ENGINES}.enabled = true|{ENGINES}.enabled=false",
    ),
    (
        "engines_on_slots",
        PPO,
        f"{RAY} cluster.gpus_per_node=4 {ENGINE}={{name:vllm,tensor_parallel_size:2}} "
        f"{ENGINES}={{enabled:false,resources:{{gpus_per_node:3}}}}",
        f"{ENGINES}.resources.gpus_per_node=2",
        f"{ENGINE}.tensor_parallel_size = 2|{ENGINES}.resources.gpus_per_node = 3",
    ),
    (
        "weight_transfer",
        PPO,
        f"{RAY} cluster.gpus_per_node=2 {ENGINES}.enabled=false cluster.ray.weight_transfer=ipc",
        "cluster.ray.weight_transfer=auto",
        f"cluster.ray.weight_transfer = ipc|{ENGINES}.enabled = false|weight_transfer=auto",
    ),
    (
        "weight_transfer",
        PPO,
        f"{RAY} cluster.device=auto cluster.ray.weight_transfer=collective",
        "cluster.device=cpu",
        f"cluster.ray.weight_transfer = collective|{ENGINES}.enabled = true|cluster.device=cpu",
    ),
    (
        "sleep_mode",
        PPO,
        f"cluster.device=auto {ENGINE}={{name:vllm,enable_sleep_mode:true}} async_rl.sampler.max_lookahead_versions=1",
        "async_rl.sampler.max_lookahead_versions=0",
        f"{ENGINE}.enable_sleep_mode = true|async_rl.sampler|a lead of 0",
    ),
    (
        "sleep_mode",
        PPO,
        f"cluster.device=cpu {ENGINE}={{name:vllm,enable_sleep_mode:true}}",
        f"{ENGINE}.enable_sleep_mode=false",
        f"{ENGINE}.enable_sleep_mode = true|cluster.device = cpu",
    ),
    (
        "sleep_mode",
        PPO,
        f"{RAY} cluster.device=auto cluster.gpus_per_node=2 {ENGINE}={{name:vllm,enable_sleep_mode:true}} "
        f"{ENGINES}.enabled=false",
        f"{ENGINES}.enabled=true",
        f"{ENGINE}.enable_sleep_mode = true|{ENGINES}.enabled = false",
    ),
    (
        "layers_on_ranks",
        PPO,
        "policy.parallel.tensor_parallel_size=2",
        f"{RAY} cluster.gpus_per_node=2",
        "policy.parallel.tensor_parallel_size = 2|1 ranks of the actor",
    ),
]
