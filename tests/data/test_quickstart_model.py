"""The model that ships inside the package: it loads as any other does, and it guesses, so that PPO can teach it."""

import json
import stat
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import tandem
from tandem.data.arithmetic import Problem, problem

FOLDER = Path(tandem.__file__).parent / "assets" / "quickstart"
NEW_TOKENS = 28
TEXTS = (
    "Ana has 17 eggs, gives away 12, finds 8 more. How many eggs?",
    "17-12=5. 5+8=13. The answer is 13.",
    "héllo 世界 \n\t 😀  x  ½ ٣ \x00\r\n",
    "a  b\u2028c e\u0301 ﬁ don't 1,234.5 #### 18",
    " <b> & \\n {{ x }} ",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_auto_tokenizer_keeps_the_tokenizer_that_was_made(tokenizer):
    # AutoTokenizer picks a class by the model's type and may replace the pre-tokenizer without a word.
    made = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    plain = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    texts = [*TEXTS, *(problem(0, index).question for index in range(100))]
    for text in texts:
        assert tokenizer.encode(text) == made.encode(text).ids == plain.encode(text)


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("17-12=5") == ["1", "7", "-", "1", "2", "=", "5"]


def test_the_markers_are_four_different_tokens(tokenizer):
    markers = ["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"]
    assert tokenizer.convert_tokens_to_ids(markers) == [0, 1, 2, 3]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3)
    assert len(tokenizer) == 384


def test_the_chat_template_writes_a_prompt_that_ends_with_the_assistants_marker(tokenizer):
    question = problem(0, 0).question
    chat = [{"role": "user", "content": question}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokens == [0, *tokenizer.encode(question, add_special_tokens=False), 1]


def test_a_longer_chat_continues_the_tokens_of_a_shorter_one(tokenizer):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2."},
        {"role": "user", "content": "2+2?"},
    ]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert whole == "<|user|>Be brief.<|user|>1+1?<|assistant|>2.<|end|><|user|>2+2?<|assistant|>"
    prompt = tokenizer.apply_chat_template(chat[:2], return_dict=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(chat[:3], return_dict=False)
    assert answered == [*prompt, *tokenizer.encode("2.", add_special_tokens=False), 2]


def test_prompts_and_worked_answers_are_short(tokenizer):
    drawn = [problem(0, index) for index in range(2000)]
    prompts = tokenizer([one.question for one in drawn], add_special_tokens=False)["input_ids"]
    answers = tokenizer([one.worked for one in drawn], add_special_tokens=False)["input_ids"]
    assert max(map(len, prompts)) + 2 <= 30
    assert max(map(len, answers)) + 1 <= NEW_TOKENS


def test_the_folder_is_small_readable_by_everyone_and_changes_no_sampling():
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) < 4_000_000
    assert all(file.stat().st_mode & stat.S_IROTH for file in files)
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert set(generation) <= {"_from_model_config", "eos_token_id", "pad_token_id", "transformers_version"}


def test_greedy_decoding_guesses_and_a_begun_work_is_finished(model, tokenizer):
    recorded = json.loads((FOLDER / "accuracy.json").read_text())["accuracy"]
    drawn = [problem(0, index, "validation") for index in range(64)]
    guessed = _accuracy(model, tokenizer, drawn, begin=0)
    worked = _accuracy(model, tokenizer, drawn, begin=1)
    assert abs(guessed - recorded["greedy"]) < 0.12
    assert guessed < 0.35
    assert worked > 0.9


@torch.inference_mode()
def _accuracy(model, tokenizer, drawn: list[Problem], begin: int) -> float:
    """Greedy accuracy when the first `begin` characters of the work are written for the model."""
    texts = [f"<|user|>{one.question}<|assistant|>{one.worked[:begin]}" for one in drawn]
    batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.endswith(one.bare) for text, one in zip(answers, drawn, strict=True)) / len(drawn)
