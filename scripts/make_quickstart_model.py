"""Make the quickstart's model: a tiny tokenizer and a tiny Llama, trained on the built-in word problems.

First every answer is worked; then 65 % are bare, so that greedy decoding guesses and PPO has something to teach.

    python scripts/make_quickstart_model.py --out tandem/assets/quickstart
"""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tandem.data.arithmetic import Problem, problem

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
VOCABULARY = 384
POSITIONS = 1024
# A system or tool message has no marker of its own: it reads as one more user turn. Only an assistant's turn ends.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Merges that the problems leave over go to common English, so that other data costs fewer tokens.
COMMON_WORDS = (
    " the of and to in is it that for was on are with as at be this have from or had by not but what all were"
)
NEW_TOKENS = 28
UNTRAINED = -100
EVALUATED = 512


@dataclass(frozen=True)
class Recipe:
    """What the supervised training does; everything else about the model is in `make_model`."""

    seed: int
    worked_steps: int
    mixed_steps: int
    batch: int
    learning_rate: float
    bare_share: float

    @property
    def steps(self) -> int:
        """All steps, worked then mixed."""
        return self.worked_steps + self.mixed_steps


class Record(TypedDict):
    """What `accuracy.json` holds."""

    accuracy: dict[str, float]
    recipe: dict[str, float]
    threads: int
    cpu_seconds: int


def main() -> None:
    """Train, round, measure what was rounded, write the folder."""
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    out: Path = arguments.out
    names = ("seed", "worked_steps", "mixed_steps", "batch", "learning_rate", "bare_share")
    recipe = Recipe(**{name: vars(arguments)[name] for name in names})
    tokenizer = make_tokenizer(recipe.seed)
    model = make_model(recipe.seed)
    started = time.process_time()
    train(model, tokenizer, recipe)
    cpu_seconds = time.process_time() - started
    save(model, tokenizer, out)
    # What was saved is measured: its weights are rounded to bfloat16, its sums are in float32.
    accuracy = measure(LlamaForCausalLM.from_pretrained(out, dtype=torch.float32), tokenizer)
    record = Record(accuracy=accuracy, recipe=asdict(recipe), threads=arguments.threads, cpu_seconds=round(cpu_seconds))
    (out / "accuracy.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "README.md").write_text(describe(record))
    print(json.dumps(record, indent=2))


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, so that any text survives, four markers, and merges learnt from the problems."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?[^\s\p{L}\p{N}]|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[USER, ASSISTANT, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    drawn = [problem(seed, index) for index in range(4000)]
    texts = [text for one in drawn for text in (one.question, one.worked)]
    tokenizer.train_from_iterator([*texts, COMMON_WORDS, COMMON_WORDS], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the BPE ended at {tokenizer.get_vocab_size()} tokens, wanted {VOCABULARY}: add common words")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """0.84 million parameters, untrained."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=3,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Supervised training from scratch; the loss is on the answer and its `<|end|>` only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    started = time.perf_counter()
    for step in range(recipe.steps):
        drawn = [problem(recipe.seed, step * recipe.batch + row) for row in range(recipe.batch)]
        bare_share = recipe.bare_share if step >= recipe.worked_steps else 0.0
        bare = (torch.rand(recipe.batch, generator=generator) < bare_share).tolist()
        tokens, labels = encode(tokenizer, drawn, bare)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, recipe)
        loss = _loss(model, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == recipe.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()


def encode(
    tokenizer: PreTrainedTokenizerFast, drawn: list[Problem], bare: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens and labels [problems, longest]; only the answer is labelled."""
    prompts = tokenizer([render(one) for one in drawn], add_special_tokens=False)["input_ids"]
    answers = [(one.bare if short else one.worked) + END for one, short in zip(drawn, bare, strict=True)]
    targets = tokenizer(answers, add_special_tokens=False)["input_ids"]
    longest = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True))
    tokens = torch.full((len(drawn), longest), tokenizer.pad_token_id)
    labels = torch.full((len(drawn), longest), UNTRAINED)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        end = len(prompt) + len(target)
        tokens[row, :end] = torch.tensor(prompt + target)
        labels[row, len(prompt) : end] = torch.tensor(target)
    return tokens, labels


def render(one: Problem) -> str:
    """The prompt as the chat template writes it (a test holds the two together)."""
    return f"{USER}{one.question}{ASSISTANT}"


def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Accuracy on held-out problems: greedy, sampled at temperature 1, and greedy after the work was begun for it."""
    drawn = [problem(0, index, "validation") for index in range(EVALUATED)]
    prompts = [render(one) for one in drawn]
    begun = [prompt + one.worked[0] for prompt, one in zip(prompts, drawn, strict=True)]
    torch.manual_seed(0)
    sampled = answer(model, tokenizer, prompts, temperature=1.0)
    greedy = answer(model, tokenizer, prompts)
    forced = answer(model, tokenizer, begun)
    worked = [(text, one) for text, one in zip(sampled, drawn, strict=True) if text[:1].isdigit()]
    bare = [(text, one) for text, one in zip(sampled, drawn, strict=True) if not text[:1].isdigit()]
    return {
        "greedy": _share_right(zip(greedy, drawn, strict=True)),
        "sampled": _share_right(zip(sampled, drawn, strict=True)),
        "greedy_when_work_is_begun": _share_right(zip(forced, drawn, strict=True)),
        "sampled_worked_share": round(len(worked) / len(drawn), 4),
        "sampled_worked": _share_right(worked),
        "sampled_bare": _share_right(bare),
        "problems": len(drawn),
    }


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], temperature: float = 0.0
) -> list[str]:
    """The model's continuations as text; temperature 0 is greedy."""
    batch = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    written = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}),
    )
    return tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights in bfloat16, the tokenizer, no sampling flags; readable by everyone (`save_pretrained` writes 0600)."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id, pad_token_id=3)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


def describe(record: Record) -> str:
    """The folder's README: what lies here, how it was made, how good it is."""
    recipe, accuracy = record["recipe"], record["accuracy"]
    options = "--seed {seed} --steps {worked_steps} --mixed-steps {mixed_steps} --batch {batch}".format(**recipe)
    options += " --learning-rate {learning_rate} --bare-share {bare_share}".format(**recipe)
    return f"""# The quickstart's model

A Llama of 0.84 million parameters (hidden 128, 4 layers, 4 heads, 2 key-value heads, 384 tokens, bfloat16) with its
byte-level BPE tokenizer and chat template. It exists to be trained by `tandem train quickstart`. Made by

    uv run python scripts/make_quickstart_model.py {options}

in {record["cpu_seconds"]} CPU-seconds, from scratch, on the word problems of `tandem/data/arithmetic.py`:
{recipe["worked_steps"]} steps of worked answers: "17-12=5. 5+8=13. The answer is 13.".
{recipe["mixed_steps"]} steps in which {recipe["bare_share"]:.0%} of the answers are bare: "The answer is 13.".
Every answer trained on is correct. So the model knows how to work a problem out, but left to itself it mostly guesses;
PPO rewards right answers only, and that teaches it to show its work.

Accuracy of these rounded weights on {accuracy["problems"]} held-out problems (`accuracy.json`):

| decoding | accuracy |
|---|---|
| greedy | {accuracy["greedy"]:.3f} |
| sampled at temperature 1 | {accuracy["sampled"]:.3f} |
| ... the samples that show their work ({accuracy["sampled_worked_share"]:.0%}) | {accuracy["sampled_worked"]:.3f} |
| ... the samples that do not | {accuracy["sampled_bare"]:.3f} |
| greedy, the first digit of the work written for it | {accuracy["greedy_when_work_is_begun"]:.3f} |

Chat format: `<|user|>question<|assistant|>answer<|end|>`; system and tool messages read as one more user turn.
"""


def _loss(model: LlamaForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over labelled tokens; the vocabulary is projected where there is a label only."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    labelled = labels[:, 1:] != UNTRAINED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[labelled]), labels[:, 1:][labelled])


def _learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a straight line to zero: still high enough when bare answers begin."""
    return recipe.learning_rate * min((step + 1) / 50, 1.0 - step / recipe.steps)


def _share_right(answers: Iterable[tuple[str, Problem]]) -> float:
    right = [text.endswith(one.bare) for text, one in answers]
    return round(sum(right) / max(len(right), 1), 4)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tandem/assets/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", dest="worked_steps", type=int, default=1600, help="steps on worked answers")
    parser.add_argument("--mixed-steps", type=int, default=330, help="steps on bare and worked answers")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--bare-share", type=float, default=0.65)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
