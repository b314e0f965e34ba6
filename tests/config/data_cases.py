"""Rules of data and validation: a config that breaks each, what the message names, and the way out."""

from tests.config.rule_cases import PPO, ROWS

MIX = "data.train={name:mixture,sources:{a:{name:gsm8k},b:{name:file,path:x}}}"
SETS = "data.validation={name:sets,sets:{a:{name:gsm8k,split:test},b:{name:file,path:x}}}"

# rule, recipe, overrides that break it, overrides after them that mend it, what the message names
CASES = [
    (
        "prompt_template",
        PPO,
        "data.prompt_template=hello",
        "data.prompt_template='{question}'",
        "data.prompt_template = hello|data.train|{question}",
    ),
    (
        "answer_in_prompt",
        PPO,
        f"data.train={ROWS} data.train.answer_field=question",
        "data.train.answer_field=answer",
        "data.train.prompt_field = question|data.train.answer_field = question",
    ),
    (
        "validation_split",
        PPO,
        "data.validation.name=arithmetic",
        "data.validation.split=validation",
        "data.validation.split = train|data.train.split = train",
    ),
    (
        "never_validates",
        PPO,
        f"data.validation={ROWS} ppo.val_period=0 ppo.val_at_start=false ppo.val_at_end=false",
        "ppo.val_at_end=true",
        "data.validation (|val_period = 0|val_at_start = false|val_at_end = false|data.validation=null",
    ),
    (
        "prompt_template",
        PPO,
        f"{MIX} data.train.sources.b.prompt_template=hello",
        "data.train.sources.b.prompt_template='{question}!'",
        "data.train.sources.b.prompt_template = hello|{question}|data.train.sources.b (",
    ),
    (
        "answer_in_prompt",
        PPO,
        f"{SETS} data.validation.sets.b.prompt_field=answer",
        "data.validation.sets.b=null",
        "data.validation.sets.b.prompt_field = answer|data.validation.sets.b.answer_field = answer",
    ),
    (
        "validation_split",
        PPO,
        f"data.train={{name:gsm8k}} {SETS} data.validation.sets.a.split=train",
        "data.validation.sets.a.split=test",
        "data.validation.sets.a.split = train|data.train.split = train|split=test",
    ),
    (
        "mixture_weights",
        PPO,
        f"{MIX} data.train.weights={{a:1}}",
        "data.train.weights.b=2",
        "data.train.weights = {a: 1.0}|b|a, b",
    ),
    (
        "mixture_weights",
        PPO,
        f"{MIX} data.train.weights={{a:1,b:2,c:3}}",
        "data.train.weights=null",
        "data.train.weights = {a: 1.0, b: 2.0, c: 3.0}|c|take it out",
    ),
    (
        "mixture_weights",
        PPO,
        "data.train={name:mixture,sources:{a:{name:gsm8k}},weights:{a:1}}",
        "data.train.weights=null",
        "data.train.weights = {a: 1.0}|one source alone",
    ),
    (
        "validation_metric",
        PPO,
        f"{SETS} checkpointing.metric_name=val:c/accuracy",
        "checkpointing.metric_name=val:a/accuracy",
        'checkpointing.metric_name = "val:c/accuracy"|val:SET/X, SET one of a, b',
    ),
    (
        "validation_metric",
        PPO,
        f"data.validation={ROWS} ppo.num_val_generations_per_prompt=6 policy.generation.val_temperature=1 "
        "checkpointing.metric_name=val:pass@3",
        "checkpointing.metric_name=val:pass@4",
        'checkpointing.metric_name = "val:pass@3"|pass@2, pass@4, pass@6, mean@6 or reward/PART',
    ),
    (
        "equal_answers",
        PPO,
        f"{SETS} ppo.num_val_generations_per_prompt=4",
        "policy.generation.val_temperature=0.6",
        "ppo.num_val_generations_per_prompt = 4|policy.generation.val_temperature = 0.0",
    ),
    (
        "same_problems",
        PPO,
        "data.train={name:reasoning_gym,tasks:[a,b],size:10,seed:3} "
        "data.validation={name:reasoning_gym,tasks:[b],size:5,seed:12}",
        "data.validation.seed=13",
        "data.validation.seed = 12|data.train.seed = 3|set data.validation.seed=13 or more",
    ),
]
