"""Which implementation writes the rollouts: an engine in this process."""

from __future__ import annotations

from tandem.config import Config
from tandem.launch.models import DTYPES, load_causal_lm
from tandem.launch.process import device_of
from tandem.roles import Engine
from tandem.rollout.transformers import transformers_engine


def build_engine(config: Config, pad_token_id: int) -> Engine:
    """Load the policy's model into the engine that the recipe names."""
    policy = config.policy
    model = load_causal_lm(
        policy.model_name,
        dtype=DTYPES[policy.precision],
        device=device_of(config),
        trust_remote_code=policy.trust_remote_code,
    )
    return transformers_engine(
        model,
        max_concurrent_samples=policy.generation.engine.max_concurrent_samples,
        max_total_sequence_length=policy.max_total_sequence_length,
        pad_token_id=pad_token_id,
    )
