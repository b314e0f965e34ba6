"""`reward_model`: a sequence-classification model reads question and response as text, by a tokenizer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tandem import cores
from tandem.config.env import RewardModelVerifier
from tandem.envs.batching import Batches
from tandem.types import Prompt, RolloutFailed, Score

KEY = "env.verifier"


class RewardModel:
    """The model's output for a chat of question and response, several chats in one pass.

    Texts are rendered by the reward model's own chat template and tokenizer: ids of the policy mean nothing to it.
    """

    def __init__(self, config: RewardModelVerifier) -> None:
        """Loads the model and tries it on one chat. ValueError for what does not fit, before anything is generated."""
        self._config = config
        self._tokenizer = load_tokenizer(config)
        self._template = template_of(config, self._tokenizer)
        self._model = load_model(config, self._tokenizer)
        self._thread = cores.thread_with_all("reward-model")
        self._batches: Batches[tuple[int, ...], float] = Batches(self._pass, config.batch_size)
        self._check()

    async def score(self, prompt: Prompt, response: str) -> Score:
        try:
            tokens = self.encode(prompt.question, response)
        except TemplateError as error:
            raise RolloutFailed(f"the reward model's chat template failed on prompt {prompt.id!r}: {error}") from error
        if len(tokens) > self._config.max_length:
            raise RolloutFailed(
                f"question and response of prompt {prompt.id!r} are {len(tokens)} tokens for the reward model,"
                f" more than {KEY}.max_length={self._config.max_length}: raise it, or lower"
                " policy.generation.max_new_tokens"
            )
        reward = await self._batches.ask(tokens)
        if reward != reward or abs(reward) == float("inf"):
            raise RolloutFailed(f"the reward model gave {reward} for prompt {prompt.id!r}: a reward must be finite")
        return Score(reward)

    def encode(self, question: str, response: str) -> tuple[int, ...]:
        """The reward model's ids of the chat."""
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        if self._config.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": self._config.system_prompt})
        text = self._tokenizer.apply_chat_template(turns, chat_template=self._template, tokenize=False)
        # The template writes the special tokens itself.
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _pass(self, rows: Sequence[tuple[int, ...]]) -> Sequence[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._forward, rows)

    @torch.no_grad()
    def _forward(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        """Rows are padded at their ends."""
        width = max(map(len, rows))
        pad = self._model.config.get_text_config().pad_token_id
        tokens_NT = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self._model.device)
        mask_NT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._model.device)
        logits_NL = self._model(input_ids=tokens_NT, attention_mask=mask_NT).logits.float()
        if self._config.output == "probability":
            logits_NL = logits_NL.sigmoid() if logits_NL.shape[1] == 1 else logits_NL.softmax(dim=1)
        return logits_NL[:, self._config.label].tolist()

    def _check(self) -> None:
        labels = self._model.config.num_labels or 0
        if self._config.label >= labels:
            raise ValueError(
                f"{KEY}.label={self._config.label}, but {self._config.model_name} has {labels} outputs, from 0 to"
                f" {labels - 1}: set {KEY}.label to the one that is the reward"
            )
        positions = self._model.config.get_text_config().max_position_embeddings
        if self._config.max_length > positions:
            raise ValueError(
                f"{KEY}.max_length={self._config.max_length} is more than the {positions} positions of"
                f" {self._config.model_name}: set {KEY}.max_length={positions} or less"
            )
        try:
            probe = self._tokenizer.decode(list(self.encode("PROBEQUESTION", "PROBERESPONSE")))
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self._config.model_name} failed ({error}): "
                f"give one with {KEY}.chat_template=FILE"
            ) from error
        for name, text in (
            ("question", "PROBEQUESTION"),
            ("response", "PROBERESPONSE"),
            ("system prompt", self._config.system_prompt),
        ):
            if text and "".join(text.split()).casefold() not in "".join(str(probe).split()).casefold():
                raise ValueError(
                    f"the chat template of {self._config.model_name} loses the {name}: {probe!r:.200}."
                    f" Give another with {KEY}.chat_template=FILE"
                    + (f", or remove {KEY}.system_prompt" if text == self._config.system_prompt else "")
                )

    async def close(self) -> None:
        """Its memory goes with it."""


def load_tokenizer(config: RewardModelVerifier) -> PreTrainedTokenizerBase:
    """The reward model's own, or the one that the recipe names."""
    name = config.tokenizer or config.model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        key = f"{KEY}.tokenizer" if config.tokenizer else f"{KEY}.model_name"
        raise ValueError(f"{key}={name}: no tokenizer can be loaded from it: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase), "it loads one or raises"
    return tokenizer


def template_of(config: RewardModelVerifier, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template as text."""
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        if not path.is_file():
            raise ValueError(f"{KEY}.chat_template={config.chat_template} is no file: give the path of a Jinja file")
        return path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of the reward model {config.model_name} has no chat template: give one with"
            f" {KEY}.chat_template=FILE, a Jinja file"
        )
    return tokenizer.get_chat_template()


def load_model(config: RewardModelVerifier, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """On its device, in eval mode. A head that the files do not hold would be random: refused."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{KEY}.device={config.device}, but torch sees no GPU here: set {KEY}.device=cpu")
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            config.model_name,
            dtype=getattr(torch, config.precision),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{KEY}.model_name={config.model_name}: no reward model can be loaded from it: {error}"
        ) from error
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"{KEY}.model_name={config.model_name} is no reward model: its files lack {', '.join(missing[:3])}, which"
            " would be random. Give a model that was trained for sequence classification"
        )
    text_config = model.config.get_text_config()
    if text_config.pad_token_id is None:  # the model finds a row's last token by it
        text_config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        model.config.pad_token_id = text_config.pad_token_id
    if text_config.pad_token_id is None:
        raise ValueError(
            f"neither {config.model_name} nor its tokenizer names a pad or an eos token: name one in its files"
        )
    return model.to(device).eval()
