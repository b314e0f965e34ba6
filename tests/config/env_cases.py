"""Rules of verifiers: a config that breaks each, what the message names, and the way out."""

from tests.config.rule_cases import GRPO, HERE, PPO

JUDGE = str(HERE / "judge.yaml")
FORM = "form:{verifier:{name:format,pattern:'a'}}"
SUM = f"env.verifier={{name:weighted_sum,components:{{right:{{verifier:{{name:gsm8k}}}},{FORM}}}}}"
PART = "env.verifier.components.form"
GDPO = "grpo.adv_estimator.name=gdpo"

# rule, recipe, overrides that break it, overrides after them that mend it, what the message names
CASES = [
    (
        "patterns",
        PPO,
        "env.verifier={name:regex,pattern:'(('}",
        "env.verifier.pattern='x'",
        "env.verifier.pattern|mend it",
    ),
    (
        "patterns",
        PPO,
        "env.verifier={name:format,pattern:'*'}",
        "env.verifier.pattern='x'",
        "env.verifier.pattern|mend it",
    ),
    ("patterns", PPO, f"{SUM} {PART}.verifier.pattern='('", f"{PART}.verifier.pattern='x'", f"{PART}.verifier.pattern"),
    ("patterns", JUDGE, "env.verifier.score_pattern='['", "env.verifier.score_pattern='x'", "score_pattern|mend it"),
    (
        "score_deadlines",
        JUDGE,
        "env.verifier.request_timeout_s=60.0",
        "env.score_timeout_s=183.0",
        "env.verifier.request_timeout_s = 60.0|up to 183 s|env.score_timeout_s = 60.0|env.score_timeout_s=183 or more",
    ),
    (
        "score_deadlines",
        PPO,
        "env.verifier.name=math_verify env.score_timeout_s=1.0",
        "env.verifier.timeout_s=1.0",
        "env.verifier.timeout_s = 5.0|env.score_timeout_s = 1.0|raise the second",
    ),
    (
        "score_deadlines",
        PPO,
        "env.verifier.name=code env.verifier.timeout_s=61.0",
        "env.score_timeout_s=70.0",
        "env.verifier.timeout_s = 61.0|env.score_timeout_s = 60.0",
    ),
    (
        "ranges",
        PPO,
        "env.verifier={name:length,min_chars:9,max_chars:5}",
        "env.verifier.min_chars=5",
        "env.verifier.min_chars = 9|env.verifier.max_chars = 5|lower the first",
    ),
    (
        "ranges",
        JUDGE,
        "env.verifier.min_score=10.0",
        "env.verifier.min_score=1.0",
        "env.verifier.min_score = 10.0|env.verifier.max_score = 10.0",
    ),
    ("judge_prompt", JUDGE, "env.verifier.prompt='good?'", "env.verifier.prompt='{response}?'", "prompt = |{response}"),
    (
        "addresses",
        JUDGE,
        "env.verifier.base_url='localhost'",
        "env.verifier.base_url=http://h/v1",
        "base_url = localhost|http",
    ),
    (
        "addresses",
        PPO,
        "env.verifier={name:reward_model,model_name:x,device:gpu}",
        "env.verifier.device=cuda",
        "env.verifier.device = gpu|cuda",
    ),
    ("component_weights", PPO, f"{SUM} {PART}.weight=0.0", f"{PART}.weight=0.1", f"{PART}.weight = 0.0|remove it"),
    ("component_weights", GRPO, GDPO, SUM, "grpo.adv_estimator.name = gdpo|env.verifier.name = |weighted_sum"),
    (
        "component_weights",
        GRPO,
        f"{GDPO} {SUM} {PART}.weight=0.5",
        "grpo.adv_estimator.reward_weights={right:1.0,form:0.5}",
        "grpo.adv_estimator.reward_weights = null|'form': 0.5|set both to the same",
    ),
    (
        "component_weights",
        GRPO,
        f"{GDPO} {SUM} grpo.adv_estimator.reward_weights={{wrong:1.0}}",
        "grpo.adv_estimator.reward_weights=null",
        "grpo.adv_estimator.reward_weights = |right, form",
    ),
]
