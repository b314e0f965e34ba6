"""`tandem export`: a trained actor or critic as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.config import Config
from tandem.config.load import load
from tandem.control import vault
from tandem.control.checkpoint import CONFIG, STATE
from tandem.data.chat import Chat
from tandem.launch.cards import actor_card, critic_card
from tandem.launch.models import DTYPES, load_causal_lm, load_tokenizer, location
from tandem.launch.process import quiet_libraries
from tandem.launch.show import CHECKPOINTS, is_checkpoint, size, size_of
from tandem.launch.trainers import support_of
from tandem.train.files import WEIGHTS, SavedTensors, first_mismatch
from tandem.train.heads import ValueHead
from tandem.train.torch.backend import named_parameters

MODELS = ("actor", "critic")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Export:
    """One model of one checkpoint, and the precision to write it in."""

    checkpoint: Path
    config: Config
    model: str
    dtype: str

    @property
    def base(self) -> str:
        """The model that training began with: its shape, and the weights that training does not touch."""
        own = self.config.value.model_name if self.model == "critic" and self.config.value else None
        return own or self.config.policy.model_name

    def fresh(self) -> PreTrainedModel:
        """That model, in the precision to write."""
        source = self.config.value if self.model == "critic" and self.config.value else self.config.policy
        return load_causal_lm(
            self.base, dtype=DTYPES[self.dtype], device=CPU, trust_remote_code=source.trust_remote_code
        )


def export_target(
    target: str, out: str, overrides: Sequence[str], *, model: str, best: bool, dtype: str | None, overwrite: bool
) -> Path:
    """Write one model of a run or checkpoint to the directory `out`. ValueError when something stands in the way."""
    if model not in MODELS:
        raise ValueError(f"--model {model}: give one of {', '.join(MODELS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: give one of {', '.join(DTYPES)}")
    checkpoint = checkpoint_of(target, best=best)
    config = load(str(checkpoint / CONFIG), overrides).config
    trained = config.value if model == "critic" else config.policy
    if trained is None:
        raise ValueError(f"{checkpoint} has no critic: its recipe has no `value`; export the actor")
    export = Export(checkpoint, config, model, dtype or trained.precision)
    there = Path(out).expanduser()
    check_place(there, export, overwrite=overwrite)
    quiet_libraries()
    write(export, there)
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(f"{model} of {checkpoint}, {export.dtype}, {size(size_of(there))}: {there}", soft_wrap=True)
    console.print(f"how to use it stands in {there / 'README.md'}", soft_wrap=True)
    return there


def checkpoint_of(target: str, *, best: bool) -> Path:
    """A checkpoint that is as it was written: the one named, or a run's newest sound or best one."""
    path = Path(target).expanduser()
    if not path.is_dir():
        raise ValueError(f"{target} is no directory; give a run directory, or one of its checkpoints")
    if is_checkpoint(path):
        if best:
            raise ValueError(f"--best chooses among a run's checkpoints, and {target} is one: give the run directory")
        vault.verified(path)
        return path
    if not (path / CHECKPOINTS).is_dir():
        raise ValueError(f"{target} is neither a run directory with checkpoints nor a checkpoint")
    if not best:
        newest = vault.newest_verified(path / CHECKPOINTS)
        if newest is None:
            raise ValueError(f"{target} holds no whole checkpoint yet; it saves every checkpointing.save_period steps")
        return newest
    pointer = path / CHECKPOINTS / vault.BEST
    name = pointer.read_text().strip() if pointer.is_file() else None
    for checkpoint in vault.marked(path / CHECKPOINTS):
        if checkpoint.name == name:
            vault.verified(checkpoint)
            return checkpoint
    raise ValueError(
        f"{target} has no best checkpoint: none was saved with checkpointing.metric_name measured; leave --best away"
    )


def check_place(out: Path, export: Export, *, overwrite: bool) -> None:
    """Refuse a place where something would be lost: anything but an earlier export, and that only if asked."""
    if any((folder / vault.MARKER).is_file() for folder in (out.resolve(), *out.resolve().parents)):
        raise ValueError(
            f"{out} lies inside a checkpoint, which would no longer be as it was written; export elsewhere"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file; give a directory that does not exist yet")
    if not overwrite:
        raise ValueError(f"{out} is not empty; give another directory, or --overwrite to replace an earlier export")
    if out.resolve() == Path(location(export.base)).resolve():
        raise ValueError(f"{out} is the model that this run began with and resumes from; export elsewhere")
    if not (out / "config.json").is_file() or any(entry.is_dir() for entry in out.iterdir()):
        raise ValueError(f"{out} does not look like an export (config.json and no folders): --overwrite would lose it")


@torch.no_grad()
def write(export: Export, out: Path) -> None:
    """Write it whole under another name beside `out`, then rename: there is never half a model at `out`."""
    tokenizer, chat = tokenizer_of(export)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        if export.model == "critic":
            model, card = token_classifier(export), critic_card(export.config, export.checkpoint)
        else:
            model, card = causal_lm(export, chat), actor_card(export.config, export.checkpoint)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card)
        partial.chmod(0o755)
        for path in partial.rglob("*"):  # transformers and tempfile write for their owner alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        put(partial, out)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"{out} could not be written: {error}; nothing there was changed") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(partial: Path, out: Path) -> None:
    """Rename to `out`. An earlier export goes when the new one is in its place."""
    if not out.exists():
        partial.rename(out)
        return
    earlier = partial.with_name(f"{partial.name}-earlier")
    out.rename(earlier)
    try:
        partial.rename(out)
    except OSError:
        earlier.rename(out)
        raise
    shutil.rmtree(earlier)


def tokenizer_of(export: Export) -> tuple[PreTrainedTokenizerBase, Chat]:
    """The tokenizer with the template of the run. ValueError when it is no longer the one of the checkpoint."""
    policy = export.config.policy
    tokenizer = load_tokenizer(policy.tokenizer.name or policy.model_name, trust_remote_code=policy.trust_remote_code)
    chat = Chat(tokenizer, policy.tokenizer, system_prompt=export.config.data.system_prompt)
    then = json.loads((export.checkpoint / STATE).read_text())["identity"]["exact"]["the tokenizer"]
    if chat.fingerprint != then:
        raise ValueError(
            f"the tokenizer or chat template of {policy.model_name} is no longer the one that {export.checkpoint} was "
            f"trained with ({chat.fingerprint}, then {then}); put it back, or name it with policy.tokenizer.name=PATH"
        )
    if policy.tokenizer.chat_template is not None:
        tokenizer.chat_template = Path(policy.tokenizer.chat_template).expanduser().read_text(encoding="utf-8")
    return tokenizer, chat


def causal_lm(export: Export, chat: Chat) -> PreTrainedModel:
    """The actor in its own class, generating by the law that it was trained under."""
    base = export.fresh()
    output_layer = base.get_output_embeddings()
    assert output_layer is not None, "checked when it was trained"
    put_back(export, base, output_layer)
    with torch.device("meta"):  # takes no memory of its own: `take` gives it the base's tensors
        model = type(base)(config_of(base))
    take(model, base.state_dict())
    generation = export.config.policy.generation
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        max_new_tokens=generation.max_new_tokens,
        eos_token_id=[chat.eos_token_id, *generation.stop_token_ids],
        stop_strings=list(generation.stop_strings) or None,
        pad_token_id=chat.pad_token_id,
        bos_token_id=base.config.get_text_config().bos_token_id,
    )
    return model


def token_classifier(export: Export) -> PreTrainedModel:
    """The critic: its backbone under transformers' linear token-classification head, one label or one for each bin."""
    base = export.fresh()
    loss = export.config.value_loss_fn
    assert loss is not None, "a recipe with `value` has it"
    support = support_of(loss)
    head = ValueHead(base.config.get_text_config().hidden_size, support=support)
    put_back(export, base, head)
    labels = ["value"] if support is None else [f"{centre:g}" for centre in centres(*support).tolist()]
    config = config_of(base, id2label=dict(enumerate(labels)), label2id={name: k for k, name in enumerate(labels)})
    try:
        with torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(config)
    except ValueError:
        raise ValueError(
            f"transformers has no token-classification model for {type(base).__name__}; the critic's weights lie by "
            f"name in {export.checkpoint / 'critic'}"
        ) from None
    backbone = f"{model.base_model_prefix}."
    heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    heads = [name for name in heads if not name.startswith(backbone)]
    state = {f"{backbone}{name}": tensor for name, tensor in base.base_model.state_dict().items()}
    weight = head.linear.weight.detach().to(DTYPES[export.dtype])
    for name in heads:
        state[f"{name}.weight"] = weight
        state[f"{name}.bias"] = weight.new_zeros(len(weight))
    take(model, state)
    return model


def put_back(export: Export, base: PreTrainedModel, head: nn.Module) -> None:
    """Copy the trained weights over those of the base. Tied weights, saved once, move together."""
    trained = SavedTensors(export.checkpoint / export.model, WEIGHTS)
    ours = named_parameters(base, head)
    different = first_mismatch(ours, trained.shapes())
    if different:
        raise ValueError(f"{export.checkpoint / export.model} is no {export.base}, which the recipe names: {different}")
    for name, parameter in ours.items():
        parameter.copy_(trained.read(name))


def config_of(base: PreTrainedModel, **changes: dict) -> PreTrainedConfig:
    """The base's config. Of a GGUF file, without the quantization that it no longer has: no such model can be saved."""
    kept = {key: value for key, value in base.config.to_dict().items() if key != "quantization_config"}
    return type(base.config).from_dict(kept | changes)


def take(model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Give an empty model its tensors. ValueError when it wants others."""
    different = first_mismatch(model.state_dict(), state.items())
    if different:
        raise ValueError(f"the weights do not fit transformers' {type(model).__name__}: {different}")
    model.load_state_dict(state, assign=True)
    model.tie_weights()


def centres(low: float, high: float, bins: int) -> Tensor:
    """The values that the bins of a value head stand for."""
    edges_K = torch.linspace(low, high, bins + 1)
    return 0.5 * (edges_K[1:] + edges_K[:-1])
