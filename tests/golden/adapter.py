"""Golden cases through our functions: `run(topic, case)` gives the outputs that the references recorded, in float64."""

from collections.abc import Callable

from tests.golden.advantage_adapter import (
    run_advantage_post,
    run_baseline_std,
    run_gae,
    run_gdpo,
    run_grpo,
    run_opd,
    run_raw_reward,
    run_reinforce_pp,
    run_token_rewards,
    run_whiten,
)
from tests.golden.batch_adapter import (
    run_dynamic_sampling,
    run_explained_variance,
    run_kl,
    run_packing,
    run_reward_scaling,
    run_reward_shaping,
)
from tests.golden.correction_adapter import run_rollout_correction, run_seq_logprob_mask
from tests.golden.golden_inputs import Case, Outputs, plain
from tests.golden.loss_adapter import run_policy_loss, run_policy_loss_verl, run_value_loss

RUNNERS: dict[str, Callable[[Case, Case], Outputs]] = {
    "gae": run_gae,
    "token_rewards": run_token_rewards,
    "whiten": run_whiten,
    "grpo": run_grpo,
    "baseline_std": run_baseline_std,
    "gdpo": run_gdpo,
    "reinforce_pp": run_reinforce_pp,
    "raw_reward": run_raw_reward,
    "opd": run_opd,
    "advantage_post": run_advantage_post,
    "kl": run_kl,
    "explained_variance": run_explained_variance,
    "reward_scaling": run_reward_scaling,
    "reward_shaping": run_reward_shaping,
    "dynamic_sampling": run_dynamic_sampling,
    "packing": run_packing,
    "policy_loss": run_policy_loss,
    "policy_loss_verl": run_policy_loss_verl,
    "value_loss": run_value_loss,
    "rollout_correction": run_rollout_correction,
    "seq_logprob_mask": run_seq_logprob_mask,
}


def run(topic: str, case: Case) -> Outputs:
    """The outputs of one case: numbers and nested lists under the names of FORMAT.md."""
    return {name: plain(value) for name, value in RUNNERS[topic](case["config"], case["inputs"]).items()}
