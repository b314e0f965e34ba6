"""A reward model: text by its own template and tokenizer, batches that change nothing, and what does not fit."""

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tandem.envs.verifiers import build_verifier
from tandem.types import Prompt, RolloutFailed, Score
from tests.envs.asking import ask_all, verifier_config

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<e>{% endfor %}"
PAD, END = 0, 1


def tokenizer():
    """A token a byte; nothing like the policy's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<p>": PAD, "<e>": END} | {letter: number + 2 for number, letter in enumerate(alphabet)}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<p>", eos_token="<e>", chat_template=TEMPLATE)


def save(path, *, labels=1, head=LlamaForSequenceClassification, template=TEMPLATE):
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=256, initializer_range=0.3, pad_token_id=PAD, num_labels=labels,
    )  # fmt: skip
    head(shape).save_pretrained(path)
    own = tokenizer()
    own.chat_template = template
    own.save_pretrained(path)
    return str(path)


def config_of(path, **options):
    return verifier_config(name="reward_model", model_name=path, **({"device": "cpu", "max_length": 200} | options))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return save(tmp_path_factory.mktemp("three_labels"), labels=3)


@torch.no_grad()
def slow(path, question, response, system=None):
    """One chat alone, its text written out by hand."""
    text = f"s:{system}<e>" * (system is not None) + f"u:{question}<e>a:{response}<e>"
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return LlamaForSequenceClassification.from_pretrained(path)(input_ids=torch.tensor([ids])).logits[0]


RESPONSES = ["72", "", "Let me see: 48 / 2 = 24, so 72.", "é ∑ 🙂", "<e>", "x" * 100]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_the_reward_is_the_models_for_the_chat_as_text_whatever_else_is_in_its_batch(model, batch_size):
    scores = ask_all(config_of(model, batch_size=batch_size), [("72", response) for response in RESPONSES])
    wanted = [slow(model, "How many?", response).item() for response in RESPONSES]
    assert [score.reward for score in scores] == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == len(wanted)


def test_alone_in_its_pass_a_score_is_the_same_to_the_bit(model):
    config = config_of(model, batch_size=1)
    together = ask_all(config, [("72", response) for response in RESPONSES])
    assert together == [ask_all(config, [("72", response)])[0] for response in RESPONSES]


def test_label_output_and_system_prompt_are_the_recipes(model, three):
    logits = slow(three, "How many?", "72", system="Judge.")
    for label in range(3):
        options = {"label": label, "system_prompt": "Judge."}
        assert ask_all(config_of(three, **options), [("", "72")])[0].reward == pytest.approx(
            logits[label].item(), abs=1e-5
        )
        (score,) = ask_all(config_of(three, output="probability", **options), [("", "72")])
        assert score.reward == pytest.approx(logits.softmax(0)[label].item(), abs=1e-5)
    (score,) = ask_all(config_of(model, output="probability"), [("", "72")])
    assert score.reward == pytest.approx(slow(model, "How many?", "72")[0].sigmoid().item(), abs=1e-5)


def test_a_chat_that_is_too_long_fails_its_rollout_and_no_other(model):
    good, bad = ask_all(config_of(model, max_length=60), [("", "72"), ("", "x" * 60)])
    assert isinstance(good, Score)
    assert isinstance(bad, RolloutFailed)
    assert "tokens for the reward model, more than env.verifier.max_length=60" in str(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": 1}, "env.verifier.label=1, but .* has 1 outputs"),
        ({"max_length": 257}, "env.verifier.max_length=257 is more than the 256 positions"),
        ({"chat_template": "no/such.jinja"}, "env.verifier.chat_template=no/such.jinja is no file"),
        ({"tokenizer": "no/such/tokenizer"}, "env.verifier.tokenizer=no/such/tokenizer: no tokenizer"),
        ({"device": "cuda"}, "env.verifier.device=cuda, but torch sees no GPU here"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_generated(model, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=message):
        build_verifier(config_of(model, **options))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ messages[0].content }}", "loses the response"),
        ("{{ messages[-1].content }}", "loses the question"),
        ("{{ raise_exception('no') }}", "the chat template of .* failed"),
    ],
)
def test_a_template_that_loses_a_text_is_refused(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        build_verifier(config_of(save(tmp_path, template=template)))


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(model, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    verifier = build_verifier(config_of(model, chat_template=str(file)))
    assert tokenizer().decode(verifier.encode("a", "b")) == "[a][b]"


def test_a_model_without_a_reward_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no reward model: its files lack score\.weight, which would be random"):
        build_verifier(config_of(save(tmp_path, head=LlamaForCausalLM)))


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ValueError, match=r"env\.verifier\.model_name=.*no .* can be loaded"):
        build_verifier(config_of(str(tmp_path)))


def test_a_reward_that_is_no_number_fails_its_rollout(model):
    verifier = build_verifier(config_of(model))
    with torch.no_grad():
        verifier._model.score.weight.fill_(float("nan"))
    with pytest.raises(RolloutFailed, match=r"gave nan for prompt 'row:7'"):
        asyncio.run(verifier.score(Prompt(0, "row:7", "How many?", "", ()), "72"))
