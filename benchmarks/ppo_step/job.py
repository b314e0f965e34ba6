"""What both sides of `ppo_step_vs_trl.py` are given, and what each gives back: one job, one result, as JSON."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.shapes import SHAPES
from tandem.data.arithmetic import problem
from tandem.launch.process import quiet_libraries

QUICKSTART = Path(__file__).parents[2] / "tandem" / "assets" / "quickstart"
FILLER = " and"  # one token of the quickstart's tokenizer wherever it stands
NEVER = "<|never|>"


@dataclass(frozen=True)
class Job:
    """One comparison. Sizes are those of one step."""

    directory: str  # of the model, the prompts and what a side writes
    model: str = "quickstart"
    device: str = "cpu"
    dtype: str = "float32"
    engine: str = "transformers"
    samples: int = 64
    prompt: int = 0  # tokens; 0: as long as the problems are
    response: int = 28
    epochs: int = 1
    mini_batches: int = 2
    steps: int = 5
    warmup: int = 2
    threads: int = 2
    micro_batch: int = 0  # TRL's; 0: a mini-batch in one piece
    rollout_batch: int = 0  # TRL's; 0: all samples at one time
    trl_weights: str = "float32"
    settings: tuple[str, ...] = ()  # ours, KEY=VALUE

    @property
    def mini_batch(self) -> int:
        return self.samples // self.mini_batches

    @property
    def model_dir(self) -> Path:
        return Path(self.directory) / "model"

    @property
    def prompts(self) -> Path:
        return Path(self.directory) / "prompts.jsonl"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        return cls(**{**values, "settings": tuple(values["settings"])})


@dataclass
class Result:
    """Of one side in one round. Lists have one entry for each timed step; `work` is that of one step."""

    versions: str
    step_s: list[float]
    cpu_s: list[float]  # of all threads: on a shared machine the steadier clock
    stages: dict[str, list[float]]
    work: dict[str, int]
    memory: dict[str, int] = field(default_factory=dict)  # bytes

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Result:
        return cls(**json.loads(path.read_text()))


def make_inputs(job: Job) -> None:
    """The model's files and the prompts. No id that the model can write ends a response: all have the full length.

    Both sides end a response at the tokenizer's eos, and TRL takes a pad token for the end too. So the tokenizer gets
    one more token, with the first id that the model has no logit for, and it is the eos of both sides and TRL's pad.
    """
    job.model_dir.mkdir(parents=True)
    if job.model == "quickstart":
        shutil.copytree(QUICKSTART, job.model_dir, dirs_exist_ok=True)
        vocabulary = AutoConfig.from_pretrained(QUICKSTART).vocab_size
    else:
        vocabulary = SHAPES[job.model].vocab_size
        torch.manual_seed(0)
        with torch.device(job.device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(SHAPES[job.model])
        model.to(torch.bfloat16).save_pretrained(job.model_dir)
    write_tokenizer(job.model_dir, never=vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    with job.prompts.open("w") as file:
        for index in range(job.samples):
            one = problem(0, index)
            question = one.question if not job.prompt else filled(tokenizer, one.question, job.prompt)
            file.write(json.dumps({"question": question, "answer": str(one.answer)}) + "\n")


def write_tokenizer(directory: Path, *, never: int) -> None:
    """The quickstart's, with one token more, of this id. Ids above its own are no text at all."""
    model = json.loads((QUICKSTART / "tokenizer.json").read_text())
    model["model"]["vocab"][NEVER] = never
    model["added_tokens"].append({**model["added_tokens"][-1], "id": never, "content": NEVER})
    settings = json.loads((QUICKSTART / "tokenizer_config.json").read_text()) | {"eos_token": NEVER}
    (directory / "tokenizer.json").write_text(json.dumps(model))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(QUICKSTART / "chat_template.jinja", directory)


def filled(tokenizer: PreTrainedTokenizerBase, question: str, tokens: int) -> str:
    """The question behind as many fillers as make the whole prompt so many tokens."""
    missing = tokens - len(chat_ids(tokenizer, question))
    text = FILLER * missing + question
    if missing < 0 or len(chat_ids(tokenizer, text)) != tokens:
        raise ValueError(f"--prompt {tokens}: a prompt has at least {tokens - missing} tokens; give more, or 0")
    return text


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The ids of a prompt."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list), "one chat"
    return ids


@contextmanager
def watch_memory(job: Job, memory: dict[str, int]) -> Generator[None]:
    """Peaks of this process in bytes. On a GPU: of all that is in use on it, looked at 50 times a second, and torch's.

    What lies on the GPU includes CUDA itself, caches of allocators, and vLLM's.
    """
    stop, peak = threading.Event(), 0

    def look() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            if not torch.cuda.is_initialized():  # looking would do it, and an engine wants to be the first
                continue
            free, whole = torch.cuda.mem_get_info()
            peak = max(peak, whole - free)

    thread = threading.Thread(target=look, daemon=True)
    if job.device == "cuda":
        thread.start()
    yield
    if job.device == "cuda":
        stop.set()
        thread.join()
        memory |= {"GPU": peak, "torch allocated": torch.cuda.max_memory_allocated()}
    memory["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stages:
    """Seconds by stage of a step, for what has no timeline of its own. `to` ends one stage and begins the next.

    On a GPU it waits for what was launched: three times a step.
    """

    def __init__(self, device: str) -> None:
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._name, self._begin = "", 0.0
        self.seconds: dict[str, float] = {}

    def to(self, name: str) -> None:
        if name == self._name:
            return
        self._wait()
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begin
        self._name, self._begin = name, now

    def take(self) -> dict[str, float]:
        """The seconds since the last take."""
        taken, self.seconds = self.seconds, {}
        return taken


if __name__ == "__main__":  # in a process of its own: it leaves nothing on a GPU
    quiet_libraries()
    make_inputs(Job.read(Path(sys.argv[1])))
