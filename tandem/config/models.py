"""The knobs of the models: policy, value, reference; their optimizers; and the engine that generates."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, Fraction, NotNegative, Positive
from tandem.config.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["float32", "bfloat16"]
Offload = Literal["none", "optimizer", "all"]
# Tokens of a pack are a multiple of this. Measured (AMD EPYC, Intel Xeon): float32 products of MKL give a row the same
# bits at every row count that is a multiple of 16, with any number of threads; at other counts they differ. So
# log-probs do not depend on what a sample is packed with. Gradients of weights sum over tokens: on Intel they are free
# of threads only with MKL_CBWR=AUTO,STRICT in the environment before the first product (which costs no time). oneDNN's
# products, which are taken where they are faster (tandem/onednn.py), are as good: AMD EPYC.
ALIGNMENT = 16


class Tokenizer(Section):
    """The tokenizer and how a chat becomes tokens."""

    name: str | None = None  # None: the policy's model_name
    chat_template: str | None = None  # a path of a Jinja file; None: the tokenizer's own
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)


class AdamW(Section):
    """AdamW (arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    lr: Positive = 1e-6
    weight_decay: NotNegative = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8


class Schedule(Section):
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine down to `min_lr_ratio`."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Fraction = 0.0  # of lr; no meaning for constant


class SequencePacking(Section):
    """Micro-batches by token budget: rows are packed end to end, without padding, up to this many tokens.

    Without it a micro-batch is one sample.
    """

    enabled: bool = True
    train_mb_tokens: Count = 8192
    logprob_mb_tokens: Count | None = None  # None: train_mb_tokens
    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"] = (
        "first_fit_decreasing"
    )
    make_sequence_length_divisible_by: Count = 1  # a micro-batch is filled up to a multiple of it, and of ALIGNMENT

    @property
    def multiple(self) -> int:
        """What the tokens of a micro-batch are a multiple of, its tail included."""
        return math.lcm(ALIGNMENT, self.make_sequence_length_divisible_by)


class Parallel(Section):
    """How a model lies on the ranks that train it: `tensor_parallel_size` share each layer, `context_parallel_size` of
    these share each micro-batch, the rest share the samples.

    `replicate` keeps the weights on every rank that has samples of its own; `shard` cuts them too (FSDP2).
    """

    tensor_parallel_size: Count = 1
    context_parallel_size: Count = 1
    sequence_parallel: bool = False  # ranks that share a layer cut the tokens between its products
    data_parallel: Literal["replicate", "shard"] | None = None  # None: shard
    keep_gathered: bool = False  # shard: a layer stays gathered over all micro-batches of a step, not for one pass only

    @property
    def shares_layers(self) -> bool:
        """Whether ranks talk to each other inside of a layer."""
        return self.tensor_parallel_size > 1 or self.context_parallel_size > 1

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks that hold one copy of the model are the product of these."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "context_parallel_size": self.context_parallel_size,
        }

    @property
    def token_parts(self) -> int:
        """How many ranks cut the tokens of one micro-batch between them."""
        return self.context_parallel_size * (self.tensor_parallel_size if self.sequence_parallel else 1)


class TorchBackend(Section):
    """transformers' own modules, laid on the ranks as `parallel` says."""

    name: Literal["torch"] = "torch"


class MegatronBackend(Section):
    """Megatron-Core; needs the extra `megatron` and GPUs. Ranks that are left over take other samples.

    `context_parallel_size` ranks share the tokens of a pack, `pipeline_model_parallel_size` ranks the layers. The first
    and the last stage may have other numbers of layers than the others: embedding and head weigh there.
    """

    name: Literal["megatron"]
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    sequence_parallel: bool = False  # ranks that share a layer cut the tokens between its products
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    grad_reduce_in_fp32: bool = True  # gradients are kept and added up in float32; false: in `precision`

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks that hold one copy of the model are the product of these."""
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
        }

    @property
    def token_parts(self) -> int:
        """How many ranks cut the tokens of one micro-batch between them."""
        return self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)


TrainingBackend = Annotated[TorchBackend | MegatronBackend, Field(discriminator="name")]


class TransformersEngine(Section):
    """The reference engine: transformers models with continuous batching."""

    name: Literal["transformers"] = "transformers"
    max_concurrent_samples: Count = 64


class Resources(Section):
    """GPUs of its own, taken from the end of the cluster's nodes."""

    num_nodes: Count = 1
    gpus_per_node: Count = 1


class Colocated(Section):
    """Whether it shares the GPUs of the policy's trainer, or has its own."""

    enabled: bool = True
    resources: Resources = Resources()  # where it does not share


class VllmEngine(Section):
    """vLLM. Keys have vLLM's own names and meaning."""

    name: Literal["vllm"]
    max_num_seqs: Count = 256  # samples written at one time
    max_num_batched_tokens: Count | None = None  # of one forward pass; None: vLLM decides
    tensor_parallel_size: Count = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5  # trainers take the rest; of all memory on a CPU
    kv_cache_memory_bytes: Count | None = None  # None: what gpu_memory_utilization leaves
    enable_prefix_caching: bool = True
    # Weights and cache leave a GPU while trainers compute. None: where they share it and nothing is written meanwhile.
    enable_sleep_mode: bool | None = None
    enforce_eager: bool = False  # no compilation, no CUDA graphs: starts sooner, writes slower


EngineChoice = Annotated[TransformersEngine | VllmEngine, Field(discriminator="name")]


class Generation(Section):
    """The law that responses are drawn from, and the engine that draws."""

    max_new_tokens: Count = 256
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = None
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's eos
    # A response ends with the token that completes one of these, which stays in it.
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    val_temperature: NotNegative = 0.0  # 0: greedy
    val_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    timeout_s: Positive = 600.0  # of one response; past it the rollout has failed (infrastructure)
    engine: EngineChoice = TransformersEngine()
    colocated: Colocated = Colocated()


class TrainedModel(Section):
    """What a policy and a value model share."""

    precision: Precision = "bfloat16"  # of the forward and backward pass; weights and optimizer are float32
    attention: Literal["auto", "sdpa", "varlen"] = "auto"  # auto: varlen on a GPU, long samples by cuDNN; sdpa on a CPU
    compile: bool | Literal["auto"] = "auto"  # layers and log-probs through torch.compile; auto: with the varlen kernel
    # What a layer computes again in backward: nothing, all but products and attention, everything.
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    # What waits in the host's memory while another model computes; the moments also while this one only infers.
    offload: Offload = "none"
    max_grad_norm: Positive | None = 1.0
    max_skipped_optimizer_steps: Annotated[int, Field(ge=0)] = 3  # steps refused for NaN or Inf before the run ends
    optimizer: AdamW = AdamW()
    scheduler: Schedule = Schedule()
    sequence_packing: SequencePacking = SequencePacking()
    backend: TrainingBackend = TorchBackend()
    parallel: Parallel = Parallel()  # of the torch backend

    @property
    def layout(self) -> tuple[str, Parallel | MegatronBackend]:
        """What lays the model on its ranks, and the key of it."""
        if isinstance(self.backend, MegatronBackend):
            return "backend", self.backend
        return "parallel", self.parallel


class Policy(TrainedModel):
    """The actor."""

    model_name: Annotated[str, Field(examples=["path/to/model"])]  # a hub name, a local directory, or `quickstart`
    trust_remote_code: bool = False
    tokenizer: Tokenizer = Tokenizer()
    logprob_chunk_size: Count = 1024  # tokens whose logits exist at one time
    train_global_batch_size: Count  # samples of one mini-batch: one optimizer step
    max_total_sequence_length: Count = 2048
    generation: Generation = Generation()


class Value(TrainedModel):
    """The critic: the same backbone with a scalar head."""

    model_name: str | None = None  # None: the policy's backbone
    trust_remote_code: bool = False
    colocated: Colocated = Colocated()
    warm_start: str | None = None  # the critic folder of a checkpoint: its weights, with a fresh optimizer


class Reference(Section):
    """A frozen model: the anchor of the KL penalty, or the teacher of `opd`."""

    model_name: str | None = None  # None: the policy as it was at the start
    trust_remote_code: bool = False
