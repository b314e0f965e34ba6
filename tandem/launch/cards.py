"""The README.md of an exported model: where it comes from, how to call it, and what its numbers mean."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.config import Config
from tandem.config.algorithm import HlGaussValueLoss
from tandem.control import vault

ACTOR = """# The actor of {name}, step {step}

Trained from `{base}` by {package} (`{algorithm}`).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
chat = {chat}
ids = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True{template_arguments}
)
print(tokenizer.decode(model.generate(**ids)[0]))
```

* Prompts were put as above. `generation_config.json` is the law of the training rollouts: temperature {temperature:g},
  top_p {top_p:g}, top_k {top_k}, at most {max_new_tokens} new tokens. Validation had temperature {val_temperature:g}.
* Log-probs of the training are those of `logits / {temperature:g}`.
"""

CRITIC = """# The critic of {name}, step {step}

Trained by {package} (`{algorithm}`, `{loss}`): the value of a state is the return that it expects of the rest
of the response, under the policy it was trained beside.

```python
import torch
from transformers import AutoModelForTokenClassification

model = AutoModelForTokenClassification.from_pretrained(".")  # its weights' precision; dtype=torch.float32 for more
logits = model(input_ids).logits[0]  # [tokens, {labels}]
after = {value}
before = after.roll(1)  # from position 1 on
```

* `after[t]` is the value of the state after token t; `before[t] = after[t - 1]` that of the state before it. The first
  token of a response has its value at the last token of the prompt. Position 0 has none.
* {head}
* The layer's bias is zero: the critic has none. `input_ids` are a whole sequence, prompt and response, without padding
  on the left.
"""


def actor_card(config: Config, checkpoint: Path) -> str:
    """How to call the actor as it was trained."""
    generation = config.policy.generation
    system = config.data.system_prompt
    chat = [{"role": "system", "content": system}] * (system is not None)
    chat = [*chat, {"role": "user", "content": config.data.train_template}]
    arguments = "".join(f", {name}={value!r}" for name, value in config.policy.tokenizer.chat_template_kwargs.items())
    return ACTOR.format(
        **common(config, checkpoint),
        chat=f"{chat!r}  # {{question}} is yours",
        template_arguments=arguments,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or "off",
        max_new_tokens=generation.max_new_tokens,
        val_temperature=generation.val_temperature,
    )


def critic_card(config: Config, checkpoint: Path) -> str:
    """What the critic's output means."""
    loss = config.value_loss_fn
    assert loss is not None, "a recipe with `value` has it"
    if isinstance(loss, HlGaussValueLoss):
        labels, support = loss.num_bins, f"{loss.value_min:g}, {loss.value_max:g}, {loss.num_bins + 1}"
        value = f"torch.softmax(logits.float(), -1) @ torch.linspace({support}).unfold(0, 2, 1).mean(-1)"
        head = (
            f"The head is a histogram of {loss.num_bins} equal bins from {loss.value_min:g} to {loss.value_max:g}; "
            "its value is the mean of the bins' centres (`id2label` in config.json) under the softmax."
        )
    else:
        labels, value, head = 1, "logits[:, 0].float()", "The head is one number: the value itself."
    return CRITIC.format(**common(config, checkpoint), loss=loss.name, labels=labels, value=value, head=head)


def common(config: Config, checkpoint: Path) -> dict[str, str]:
    """What both cards say."""
    return {
        "name": config.name,
        "step": str(int(checkpoint.name.removeprefix("step_"))),
        "base": config.policy.model_name,
        "package": json.loads((checkpoint / vault.MANIFEST).read_text())["package"],
        "algorithm": "ppo" if config.ppo else "grpo",
    }
