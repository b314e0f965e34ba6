"""The invariance kit: what must hold of an advantage estimator, a loss or a reward of your own. See docs/testing.md."""

from tandem.testing.estimators import (
    check_estimator,
    estimator_is_deterministic,
    estimator_is_zero_on_empty,
    masked_slots_do_not_matter,
    order_of_samples_does_not_matter,
    sample_columns,
)
from tandem.testing.losses import (
    check_loss,
    first_ratio_gives_the_policy_gradient,
    loss_columns,
    loss_is_deterministic,
    loss_is_zero_on_empty,
    masked_tokens_do_not_matter,
    micro_batches_add_up,
    order_of_tokens_does_not_matter,
)
from tandem.testing.rewards import check_reward, check_verifier

__all__ = [
    "check_estimator",
    "check_loss",
    "check_reward",
    "check_verifier",
    "estimator_is_deterministic",
    "estimator_is_zero_on_empty",
    "first_ratio_gives_the_policy_gradient",
    "loss_columns",
    "loss_is_deterministic",
    "loss_is_zero_on_empty",
    "masked_slots_do_not_matter",
    "masked_tokens_do_not_matter",
    "micro_batches_add_up",
    "order_of_samples_does_not_matter",
    "order_of_tokens_does_not_matter",
    "sample_columns",
]
