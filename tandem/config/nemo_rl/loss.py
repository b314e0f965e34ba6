"""The table for `loss_fn` and `value_loss_fn`: NeMo-RL's switches become choices."""

from __future__ import annotations

from tandem.config.nemo_rl.entry import Entry, Outcome, by, lacking, mapped, nothing, refused, same
from tandem.config.nemo_rl.source import Source
from tandem.config.schema import Plain

CORRECTION = "loss_fn.importance_sampling_correction"
RATIOS = {
    "disable_ppo_ratio": "none",
    "force_on_policy_ratio": "on_policy",
    "sequence_level_importance_ratios": "sequence",
}


def correction_of(source: Source) -> str | None:
    """The correction that NeMo-RL would apply. Its first versions had no type: a ratio alone meant tis."""
    if not source.get("loss_fn.use_importance_sampling_correction", False):
        return None
    without_type = "plain" if source.get("loss_fn.truncated_importance_sampling_ratio") is None else "tis"
    return source.get("loss_fn.truncated_importance_sampling_type", without_type)


def _penalty(source: Source, key: str, value: Plain) -> Outcome:
    if not value:
        return mapped({key: 0.0}, "no section reference")
    return mapped({key: value, "reference": {}}, "and a section reference")


def _ratio(source: Source, key: str, value: Plain) -> Outcome:
    name = key.split(".")[-1]
    if not value:
        return nothing("false")
    # NeMo-RL looks at force_on_policy_ratio first, then at disable_ppo_ratio.
    if name == "disable_ppo_ratio" and source.get("loss_fn.force_on_policy_ratio", False):
        return nothing("force_on_policy_ratio goes first")
    if name == "sequence_level_importance_ratios" and any(
        source.get(f"loss_fn.{other}", False) for other in ("force_on_policy_ratio", "disable_ppo_ratio")
    ):
        return refused("beside a ratio that is off, only the correction would be one number a sample")
    return mapped({"loss_fn.ratio": RATIOS[name]})


def _aggregation(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"loss_fn.loss_aggregation": "token-mean" if value else "seq-mean-token-mean"})


def _corrects(source: Source, key: str, value: Plain) -> Outcome:
    name = correction_of(source)
    return mapped({f"{CORRECTION}.name": name}) if name else nothing("no section importance_sampling_correction")


def _correction_type(source: Source, key: str, value: Plain) -> Outcome:
    if correction_of(source) is None:
        return nothing("the correction is off")
    return nothing("null: the ratio decides") if value is None else mapped({f"{CORRECTION}.name": value})


def _bound(source: Source, key: str, value: Plain) -> Outcome:
    if correction_of(source) in (None, "plain"):
        return nothing("no correction is cut")
    bound = "ratio_min" if key.endswith("_min") else "ratio_max"
    return nothing("null") if value is None else mapped({f"{CORRECTION}.{bound}": value})


SAME = (
    *("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward"),
    *("use_on_policy_kl_approximation", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_cispo"),
    "positive_example_nll_weight",
)

ENTRIES: tuple[Entry, ...] = (
    same(" ".join(f"loss_fn.{name}" for name in SAME)),
    by(
        "loss_fn.reference_policy_kl_penalty",
        "loss_fn.reference_policy_kl_penalty reference",
        "above 0 there is a section `reference`",
        _penalty,
    ),
    by(
        "loss_fn.disable_ppo_ratio loss_fn.force_on_policy_ratio loss_fn.sequence_level_importance_ratios",
        "loss_fn.ratio",
        "none, on_policy, sequence; token without them",
        _ratio,
    ),
    by("loss_fn.token_level_loss", "loss_fn.loss_aggregation", "token-mean, or seq-mean-token-mean", _aggregation),
    by(
        "loss_fn.use_importance_sampling_correction",
        f"{CORRECTION}.name",
        "plain, or the type that is given; tis for a ratio without a type",
        _corrects,
    ),
    by("loss_fn.truncated_importance_sampling_type", f"{CORRECTION}.name", "the same names", _correction_type),
    by("loss_fn.truncated_importance_sampling_ratio", f"{CORRECTION}.ratio_max", "", _bound),
    by("loss_fn.truncated_importance_sampling_ratio_min", f"{CORRECTION}.ratio_min", "", _bound),
    lacking(
        "loss_fn.seq_logprob_error_in_loss", "samples are left out before the losses (`seq_logprob_error_threshold`)"
    ),
    same("value_loss_fn.scale value_loss_fn.cliprange", "with `value_loss_fn.name: mse`"),
)
