"""The memory plan beside what a GPU measured: updates of models with random weights, one GPU, minutes.

    uv run python benchmarks/memory_plan.py                      # all rows
    uv run python benchmarks/memory_plan.py --rows 135m,actor 0.5b,critic,ac=full
    uv run python benchmarks/memory_plan.py --device cpu --tiny  # tries the code, measures nothing

Each row is a process of its own: a row that runs out of memory says so and the next one begins. `beside` is a second
model (a critic, an actor) on the same GPU, off-loaded as the row says. Measured is torch's peak of allocated bytes over
two mini-batches of two micro-batches each: what the plan counts, but for its allowance for CUDA itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.shapes import SHAPES as WHOLE_NAMES
from tandem.config.algorithm import MseValueLoss, PolicyLoss
from tandem.config.models import TrainedModel
from tandem.launch.memory.held import Held, Model
from tandem.launch.memory.plan import GIB, passes_of, ranks_of
from tandem.launch.memory.sizes import size_of
from tandem.train.backend import Backend, Output, Pack
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.objectives import PolicyObjective, ValueObjective
from tandem.train.packs import pack_batch
from tandem.train.torch.backend import build_torch_backend
from tandem.types import Batch, Metrics

LENGTH, CHUNK = 1024, 1024
SHAPES = {name.rpartition("-")[2]: config for name, config in WHOLE_NAMES.items()}
DEFAULT = (
    "135m,actor,mb=16384",
    "135m,actor,mb=16384,beside=critic",
    "0.5b,actor,mb=8192",
    "0.5b,critic,mb=8192,ac=full",
    "1.5b,actor,mb=8192,ac=selective,beside=critic,offload=optimizer",
    "1.5b,actor,mb=8192,ac=full,beside=critic,offload=all",
    "1.5b,critic,mb=4096,compile=false",
    "1.5b,actor,mb=4096,compile=false,ac=selective",
    "7b,actor,mb=4096,ac=full,offload=optimizer",
)


@dataclass(frozen=True)
class Row:
    """One combination. `offload` is that of both models."""

    shape: str
    model: Literal["actor", "critic"]
    mb: int = 8192
    ac: str = "none"
    compile: str = "auto"
    offload: str = "none"
    beside: str = ""


def parse(text: str) -> Row:
    """`shape,model,option=value,...`"""
    shape, model, *options = text.split(",")
    values = dict(option.split("=") for option in options)
    numbers = {"mb": int(values["mb"])} if "mb" in values else {}
    return replace(Row(shape, "critic" if model == "critic" else "actor"), **(values | numbers))


def section_of(row: Row, device: str) -> TrainedModel:
    """As a recipe would have it."""
    return TrainedModel.model_validate(
        {
            "precision": "bfloat16",
            "activation_checkpointing": row.ac,
            "compile": "auto" if row.compile == "auto" else row.compile == "true",
            "offload": row.offload if device == "cuda" else "none",
            "sequence_packing": {"train_mb_tokens": row.mb},
        }
    )


def planned(row: Row, name: str, device: str) -> Model:
    """The plan's view of one model of a row."""
    section = section_of(row, device)
    with torch.device("meta"):
        size = size_of(AutoModelForCausalLM.from_config(SHAPES[row.shape]))
    passes = passes_of(
        section, ranks_of(section, 1), row.mb, value=name == "critic", chunk=CHUNK, tempered=False, longest=LENGTH
    )
    return Model(
        size,
        ranks_of(section, 1),
        passes,
        passes,
        trained=True,
        offload=section.offload,
        packs=2,
        updates=2,
        gradient_waits=False,
    )


def plan_of(row: Row, device: str) -> dict[str, Held]:
    """What the fullest moment of a pass with values or log-probs, and of an update, should be."""
    model = planned(row, row.model, device)
    rest = planned(row, row.beside, device).away if row.beside else Held()
    return {"infer": rest + model.inferring, "update": rest + model.updating}


def build(row: Row, name: str, device: str) -> tuple[Backend, PolicyObjective | ValueObjective]:
    torch.manual_seed(0)
    config = SHAPES[row.shape]
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    objective: PolicyObjective | ValueObjective
    if name == "critic":
        head, objective = ValueHead(config.hidden_size), ValueObjective(MseValueLoss())
    else:
        head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=CHUNK)
        objective = PolicyObjective(PolicyLoss())
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    section = section_of(row, device)
    return build_torch_backend(model, head, section, total_optimizer_steps=100, device=where), objective


def packs_of(row: Row) -> list[Pack]:
    """Two micro-batches, every token but the first of a row in the loss."""
    count = 2 * row.mb // LENGTH
    draw = torch.Generator().manual_seed(0)
    noise = {"old_logprobs": -11.9, "gen_logprobs": -11.9, "advantages": 0.0, "values": 0.0, "returns": 0.0}
    columns: dict[str, list[Tensor]] = {
        name: [at + 0.1 * torch.randn(LENGTH, generator=draw) for _ in range(count)] for name, at in noise.items()
    }
    vocabulary = SHAPES[row.shape].vocab_size
    columns["tokens"] = [torch.randint(vocabulary, (LENGTH,), generator=draw) for _ in range(count)]
    columns["mask"] = [torch.arange(LENGTH) > 0 for _ in range(count)]
    columns["weights"] = columns["value_weights"] = [mask.float() for mask in columns["mask"]]
    batch = Batch(tuple(range(count)), (LENGTH,) * count, tuple(range(count)))
    return pack_batch(batch, columns, [range(count // 2), range(count // 2, count)])


def update(backend: Backend, objective: PolicyObjective | ValueObjective, packs: list[Pack]) -> None:
    def loss(output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
        return objective(output, pack, {})

    backend.forward_backward(packs, loss)
    backend.optim_step(float(sum(pack.tokens for pack in packs)))


def infer(backend: Backend, packs: list[Pack]) -> None:
    for _ in backend.infer(packs):
        pass


def measure(row: Row, device: str) -> dict[str, int]:
    """Peaks of allocated bytes, once both models have stepped: moments exist from the first step on."""
    packs, names = packs_of(row), [*([row.beside] if row.beside else []), row.model]
    built = {name: build(row, name, device) for name in names}
    for backend, objective in built.values():
        infer(backend, packs)
        update(backend, objective, packs)
        backend.park()  # as when its turn is over
    backend, objective = built[row.model]
    found = {}
    works = {"infer": lambda: infer(backend, packs), "update": lambda: twice(backend, objective, packs)}
    for name, work in works.items():
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        work()
        found[name] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return found


def twice(backend: Backend, objective: PolicyObjective | ValueObjective, packs: list[Pack]) -> None:
    """The second mini-batch begins with the moments there."""
    update(backend, objective, packs)
    update(backend, objective, packs)


def line(text: str, plan: dict[str, int], found: dict[str, int] | None) -> str:
    cells = [text]
    for name, size in plan.items():
        if found is None:
            cells += [f"{size / GIB:.2f}", "out of memory", ""]
        elif not found[name]:
            cells += [f"{size / GIB:.2f}", "", ""]
        else:
            cells += [f"{size / GIB:.2f}", f"{found[name] / GIB:.2f}", f"{size / found[name] - 1:+.1%}"]
    return "| " + " | ".join(cells) + " |"


def run_alone(text: str, device: str, timeout_s: float) -> tuple[str, str]:
    """One row in a process of its own. Its line, and what went wrong."""
    plan = {name: held.total for name, held in plan_of(parse(text), device).items()}
    command = [sys.executable, __file__, "--row", text, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"| {text} | not done in {timeout_s:.0f} s |", ""
    if done.returncode == 0:
        return line(text, plan, json.loads(done.stdout.splitlines()[-1])), ""
    if "OutOfMemoryError" in done.stderr:
        return line(text, plan, None), ""
    return f"| {text} | failed |", done.stderr[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=DEFAULT)
    parser.add_argument("--row", help="one row, in this process; prints bytes as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="the rows with a tiny model instead")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one row")
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(measure(parse(asked.row), asked.device)))
        return
    rows = [f"tiny,{text.split(',', 1)[1]}" for text in asked.rows] if asked.tiny else asked.rows
    lines = []
    for text in rows:
        found, trouble = run_alone(text, asked.device, asked.timeout_s)
        print(found, trouble, sep="\n" if trouble else "", file=sys.stderr, flush=True)
        lines.append(found)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU: nothing is measured"
    print(f"{name}, torch {torch.__version__}; GiB; rows of {LENGTH} tokens, two micro-batches a mini-batch")
    print("| row | infer planned | measured | off | update planned | measured | off |")
    print("|---" * 7 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
