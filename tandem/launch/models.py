"""Models and tokenizers by name: a hub name, a local directory, or `quickstart`, the one inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

QUICKSTART = "quickstart"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def location(name: str) -> str:
    """Where transformers finds this model. A path that does not exist is refused, not looked up on a hub."""
    if name == QUICKSTART:
        return str(files("tandem").joinpath("assets", "quickstart"))
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not looks_like_path and not Path(name).exists():
        return name
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ValueError(f"model {name!r}: no such directory; give one with a config.json, or a hub name")
    if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise ValueError(f"model {name!r}: the directory has no config.json; was it exported with `save_pretrained`?")
    return str(path)


def gguf_file(place: str) -> str | None:
    """The GGUF file of a directory that has no config.json: transformers loads it with the package `gguf`."""
    path = Path(place)
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    return min(file.name for file in path.glob("*.gguf"))


def load_causal_lm(name: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """A causal language model in evaluation mode. Raises ValueError in words when it cannot be had."""
    place = location(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            **({"gguf_file": file} if (file := gguf_file(place)) else {}),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(refusal("model", name, error)) from error
    return model.to(device).eval()


def shape_of(name: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model without its weights (they lie on the device `meta`). Raises ValueError in words."""
    place = location(name)
    options = {"gguf_file": file} if (file := gguf_file(place)) else {}
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(refusal("model", name, error)) from error


def load_tokenizer(name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    place = location(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place,
            trust_remote_code=trust_remote_code,
            **({"gguf_file": file} if (file := gguf_file(place)) else {}),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(refusal("tokenizer", name, error)) from error
    if tokenizer is None:
        raise ValueError(f"tokenizer {name!r}: transformers knows none for this model; set policy.tokenizer.name")
    return tokenizer


def architecture_of(model: PreTrainedModel) -> str:
    """A short name of a model's shape: its class, sizes and parameter count, not its weights."""
    config = model.config.get_text_config()
    sizes = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
    return f"{type(model).__name__} ({sizes}, {sum(p.numel() for p in model.parameters())} parameters)"


def refusal(kind: str, name: str, error: Exception) -> str:
    """Why a model cannot be loaded, in one line."""
    reason = " ".join(str(error).split())
    return (
        f"{kind} {name!r} could not be loaded ({reason[:300]}); give a local directory, a hub name, or {QUICKSTART!r}"
    )
