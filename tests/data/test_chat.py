"""Chats: plain ids, one BOS, the special ids, and nothing set in a recipe that a template ignores."""

import pytest
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tandem.config.models import Tokenizer
from tandem.data.chat import Chat
from tandem.data.rows import Message

WORDS = [
    "<s>",
    "</s>",
    "<pad>",
    "<user>",
    "<system>",
    "<answer>",
    "<think>",
    "What",
    "is",
    "2",
    "+",
    "3?",
    "Be",
    "brief.",
    "5",
    "[unk]",
]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<answer>{% if enable_thinking %} <think>{% endif %}{% endif %}"
)
QUESTION = "What is 2 + 3?"


def tokenizer(template=TEMPLATE, **tokens):
    words = Words(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[unk]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )  # adds a BOS, as Llama's does
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "[unk]"} | tokens
    made = PreTrainedTokenizerFast(tokenizer_object=words, **{name: token for name, token in named.items() if token})
    made.chat_template = template
    return made


def ids(text):
    return tuple(WORDS.index(word) for word in text.split())


def test_a_question_becomes_plain_ids_with_one_bos_up_to_where_the_answer_begins():
    encoded = Chat(tokenizer(), Tokenizer()).encode(QUESTION)
    assert encoded == ids("<s> <user> What is 2 + 3? <answer>")
    assert {type(token) for token in encoded} == {int}


def test_system_prompt_and_template_arguments_reach_the_template():
    config = Tokenizer(chat_template_kwargs={"enable_thinking": True})
    encoded = Chat(tokenizer(), config, system_prompt="Be brief.").encode(QUESTION)
    assert encoded == ids("<s> <system> Be brief. <user> What is 2 + 3? <answer> <think>")


def test_a_chat_of_several_messages_is_encoded_whole():
    chat = [
        Message("system", "Be brief."),
        Message("user", "2 + 3?"),
        Message("answer", "5"),
        Message("user", "What is"),
    ]
    encoded = Chat(tokenizer(), Tokenizer()).encode(chat)
    assert encoded == ids("<s> <system> Be brief. <user> 2 + 3? <answer> 5 <user> What is <answer>")
    with pytest.raises(ValueError, match=r"begin with a system message, and data\.system_prompt is set too"):
        Chat(tokenizer(), Tokenizer(), system_prompt="Be brief.").encode(chat)


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} <answer>")
    config = Tokenizer(chat_template=str(tmp_path / "mine.jinja"))
    assert Chat(tokenizer(template=None), config).encode(QUESTION) == ids("What is 2 + 3? <answer>")


def test_responses_are_decoded_without_special_tokens():
    assert Chat(tokenizer(), Tokenizer()).decode(ids("<s> 5 </s>")) == "5"


def test_pad_is_its_own_or_eos():
    assert Chat(tokenizer(), Tokenizer()).pad_token_id == WORDS.index("</s>")
    assert Chat(tokenizer(pad_token="<pad>"), Tokenizer()).pad_token_id == WORDS.index("<pad>")
    assert Chat(tokenizer(), Tokenizer()).eos_token_id == WORDS.index("</s>")


@pytest.mark.parametrize(
    ("made", "config", "system", "message"),
    [
        ({"template": None}, {}, None, "has no chat template"),
        ({"eos_token": None}, {}, None, "has no eos token"),
        ({}, {"chat_template": "missing.jinja"}, None, "policy.tokenizer.chat_template=missing.jinja is no file"),
        ({}, {"chat_template_kwargs": {"thinking": True}}, None, "chat_template_kwargs.thinking has no effect"),
        ({}, {"chat_template_kwargs": {"tokenize": True}}, None, "chat_template_kwargs.tokenize is set by Tandem"),
        ({"template": "{{ messages[-1].content }}"}, {}, "Be brief.", "data.system_prompt='Be brief.' has no effect"),
        ({"template": "{{ raise_exception('no system') }}"}, {}, "Be brief.", "remove data.system_prompt"),
        ({"template": "{% for m in messages %}"}, {}, None, "the chat template failed (TemplateSyntaxError"),
        ({"template": "<user> <answer>"}, {}, None, "the chat template loses the question"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(made, config, system, message):
    with pytest.raises(ValueError, match=r"policy\.tokenizer|tokenizer_config|template") as error:
        Chat(tokenizer(**made), Tokenizer(**config), system_prompt=system)
    assert message in str(error.value)
