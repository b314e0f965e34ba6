"""A vLLM engine from its section of the recipe."""

from __future__ import annotations

from vllm import EngineArgs, LLMEngine  # type: ignore  # not every checkout has vllm
from vllm.platforms import current_platform  # type: ignore  # as above
from vllm.usage.usage_lib import UsageContext  # type: ignore  # as above

from tandem.config.models import Precision, VllmEngine
from tandem.rollout.stops import Decode
from tandem.rollout.threaded import ThreadedEngine
from tandem.rollout.vllm.decoder import VllmDecoder


def vllm_engine(
    section: VllmEngine,
    *,
    model: str,
    precision: Precision,
    max_total_sequence_length: int,
    trust_remote_code: bool,
    can_sleep: bool,
    decode: Decode | None = None,
) -> ThreadedEngine:
    """`model` is a directory or a hub name. Its weights are read; a trainer's may follow. None sleeps on a CPU.

    `decode`: ids to text, where requests have stop strings.
    """
    args = engine_args(
        section,
        model=model,
        precision=precision,
        max_total_sequence_length=max_total_sequence_length,
        trust_remote_code=trust_remote_code,
        can_sleep=can_sleep,
    )
    return ThreadedEngine(vllm_decoder(args), name="vllm-engine", decode=decode)


def vllm_decoder(args: EngineArgs) -> VllmDecoder:
    """What nobody set (tokens of a pass) vLLM chooses by who asks: as for its own LLM class, which has batches, too."""
    return VllmDecoder(LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS))


def engine_args(
    section: VllmEngine,
    *,
    model: str,
    precision: Precision,
    max_total_sequence_length: int,
    trust_remote_code: bool,
    can_sleep: bool,
) -> EngineArgs:
    """What vLLM is started with: the recipe's knobs, and what the Engine role asks for."""
    return EngineArgs(
        model=model,
        trust_remote_code=trust_remote_code,
        dtype=precision,
        max_model_len=max_total_sequence_length,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        tensor_parallel_size=section.tensor_parallel_size,
        # Inside of a Ray actor vLLM would take Ray's own executor for several ranks: their GPUs are this process's.
        distributed_executor_backend="mp" if section.tensor_parallel_size > 1 else "uni",
        gpu_memory_utilization=section.gpu_memory_utilization,
        kv_cache_memory_bytes=section.kv_cache_memory_bytes,
        enable_prefix_caching=section.enable_prefix_caching,
        enforce_eager=section.enforce_eager,
        enable_sleep_mode=can_sleep,  # its memory comes from an allocator that can give it back
        skip_tokenizer_init=True,  # token ids in, token ids out
        logprobs_mode="processed_logprobs",  # of the law that is sampled; the default ignores the temperature
        async_scheduling=vllm_device() == "cuda",  # a step is scheduled while the one before computes
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,  # every request has its own
    )


def vllm_device() -> str:
    """The kind of device that the installed vLLM runs on, in torch's words."""
    return str(current_platform.device_type)
