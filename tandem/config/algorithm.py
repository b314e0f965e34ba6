"""The knobs of the algorithm: `ppo` or `grpo`, the losses, and how far generation may run ahead."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.section import Section

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Gae(Section):
    """Generalised advantage estimation: the only estimator with a critic (arXiv:1506.02438; decoupled: 2504.05118)."""

    name: Literal["gae"] = "gae"
    gae_gamma: Fraction = 1.0
    gae_lambda: Fraction = 1.0
    gae_lambda_value: Fraction | None = None  # None: gae_lambda
    gae_lambda_policy: Fraction | None = None  # None: gae_lambda
    length_adaptive_alpha: NotNegative = 0.0  # 0: off; else lambda_policy = 1 - 1 / (alpha * length)
    normalize_advantages: bool = True
    bootstrap_truncated: bool = False  # a truncated sample's last state is worth the critic's estimate, not 0

    @property
    def lambda_value(self) -> float:
        return self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value

    @property
    def lambda_policy(self) -> float:
        return self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy


class GrpoEstimator(Section):
    """Reward against the group's mean, over the group's spread (arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False


class Rloo(Section):
    """Reward against the mean of the group's other samples (arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Section):
    """Reward, minus the group's mean if asked, whitened over the batch (arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    minus_baseline: bool = True


class Gdpo(Section):
    """One GRPO advantage per reward component, summed by weight, whitened over the batch."""

    name: Literal["gdpo"] = "gdpo"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False
    reward_weights: dict[str, float] | None = None  # None: every component weighs 1


class RawReward(Section):
    """The reward itself on every token."""

    name: Literal["raw_reward"] = "raw_reward"
    normalize_advantages: bool = False


class Opd(Section):
    """On-policy distillation: the reference is the teacher, its log-prob minus ours is the advantage."""

    name: Literal["opd"] = "opd"


Estimator = Annotated[
    Gae | GrpoEstimator | Rloo | ReinforcePlusPlus | Gdpo | RawReward | Opd, Field(discriminator="name")
]


class RewardScaling(Section):
    """Clamp to the source range, then map linearly to the target range."""

    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


class Overlong(Section):
    """A soft penalty that grows over the last `overlong_buffer_length` tokens (DAPO, arXiv:2503.14476 eq. 13)."""

    name: Literal["overlong"] = "overlong"
    max_response_length: Count
    overlong_buffer_length: Count
    overlong_buffer_penalty: NotNegative = 1.0


class StopProperly(Section):
    """A truncated sample's reward is multiplied by this."""

    name: Literal["stop_properly"] = "stop_properly"
    stop_properly_penalty_coef: Fraction


RewardShaping = Annotated[Overlong | StopProperly, Field(discriminator="name")]


class Algorithm(Section):
    """What `ppo` and `grpo` share: the size of a step, its length, the reward's way to an advantage, and validation."""

    num_prompts_per_step: Count = 16
    num_generations_per_prompt: Count = 4
    max_num_steps: Count = 100
    max_num_epochs: Count = 1000
    reward_scaling: RewardScaling | None = None
    reward_shaping: RewardShaping | None = None
    overlong_filtering: bool = False
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: Count = 10  # per step; past it the run ends and says that nothing has a signal
    seq_logprob_error_threshold: Positive | None = None
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    ppo_epochs: Count = 1
    target_kl: Positive | None = None  # stop the epochs of a step once the policy has moved this far
    val_period: Annotated[int, Field(ge=0)] = 10  # 0: never during training
    val_at_start: bool = True
    val_at_end: bool = True
    max_val_samples: Count | None = 256  # prompts of each validation set, the first ones; None: all
    num_val_generations_per_prompt: Count = 1  # more than one: pass@k and mean@k
    val_batch_size: Count = 256  # validation prompts that are answered at one time

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt


class Ppo(Algorithm):
    """PPO with a critic by default (arXiv:1707.06347)."""

    adv_estimator: Estimator = Gae()
    policy_training_start_step: Annotated[int, Field(ge=0)] = 0  # before it only the critic learns


class Grpo(Algorithm):
    """The same loop without a critic."""

    adv_estimator: Estimator = GrpoEstimator()


class ImportanceSampling(Section):
    """Weights for tokens that another version, or another kernel, sampled: exp(old - generation log-prob)."""

    name: Literal["plain", "tis", "icepop", "seq-mask-tis"]
    ratio_max: Positive | None = None  # every kind but `plain` needs it
    ratio_min: NotNegative | None = None


class AdaptiveKl(Section):
    """Moves the KL penalty towards a target (arXiv:1909.08593 sec. 2.2)."""

    target: Positive
    horizon: Count


class PolicyLoss(Section):
    """The clipped policy loss and its auxiliary terms."""

    ratio: Literal["token", "sequence", "on_policy", "none"] = "token"  # sequence: GSPO; none: REINFORCE
    ratio_clip_min: NotNegative = 0.2
    ratio_clip_max: NotNegative = 0.2
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None  # dual clip
    use_cispo: bool = False
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    importance_sampling_correction: ImportanceSampling | None = None
    reference_policy_kl_penalty: NotNegative = 0.0
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    kl_input_clamp_value: Positive | None = 20.0
    kl_output_clamp_value: Positive | None = 10.0
    adaptive_kl: AdaptiveKl | None = None
    positive_example_nll_weight: NotNegative = 0.0
    entropy_bonus: NotNegative = 0.0


class MseValueLoss(Section):
    """Clipped squared error: 0.5 * scale * max((v - R)^2, (clip(v) - R)^2)."""

    name: Literal["mse"] = "mse"
    scale: Positive = 1.0
    cliprange: Positive | None = 0.2


class HuberValueLoss(Section):
    """Huber loss of v - R."""

    name: Literal["huber"] = "huber"
    scale: Positive = 1.0
    delta: Positive = 1.0


class HlGaussValueLoss(Section):
    """Classification over bins against a Gaussian-smoothed target (arXiv:2403.03950)."""

    name: Literal["hl_gauss"] = "hl_gauss"
    scale: Positive = 1.0
    num_bins: Annotated[int, Field(ge=2)] = 51
    value_min: float = 0.0
    value_max: float = 1.0
    sigma_ratio: Positive = 0.75  # sigma over the width of a bin


ValueLoss = Annotated[MseValueLoss | HuberValueLoss | HlGaussValueLoss, Field(discriminator="name")]
