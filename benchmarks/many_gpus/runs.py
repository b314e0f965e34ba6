"""Parts c and d: whole runs under Ray of a Qwen2-1.5B shape, trainers and engines on the same GPUs or on own ones."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from shutil import copy
from typing import Any

import yaml

from benchmarks.many_gpus.place import Place

COLOCATED, APART = "colocated", "apart"
LEADS = (0, 1, 2)
SAMPLES, GROUP, LENGTH = 64, 4, 1024  # of a GPU that writes: samples a step, samples a prompt, tokens of a response
MINI_BATCHES = 4
WITHOUT_RAY = "the extra ray"


def steps_of(lead: int) -> tuple[int, int, int]:
    """Steps of a run, and the first and last that are measured: compiled, as far ahead as they may be, not at the end.

    The first step compiles; the lead is there after `lead` steps; for the last `lead` ones nothing is left to write.
    """
    before, measured = max(1, lead), 2
    return before + measured + lead, before + 1, before + measured


def colocated(place: Place) -> int:
    """`tandem train` of a recipe, in this process's place: signals reach it."""
    if place.lacks("c", "ray", WITHOUT_RAY):
        return 0
    recipe = write_recipe(place, COLOCATED, writing=place.gpus, training=place.gpus)
    if place.gpus < 8 and not place.cpu:
        place.note("c", f"{SAMPLES * place.gpus} samples a step on {place.gpus} GPUs: 512 need 8")
    os.execv(sys.executable, [sys.executable, "-m", "tandem", "train", str(recipe)])


def apart(place: Place) -> int:
    """One run after the other over the same processes, each further ahead."""
    if place.gpus < 2:
        place.note("d", f"not run: trainers and engines on own GPUs need 2, {place.gpus} here")
        return 0
    if place.lacks("d", "ray", WITHOUT_RAY):
        return 0
    half = place.gpus // 2
    recipe = write_recipe(place, APART, writing=half, training=place.gpus - half)
    if half < 4 and not place.cpu:
        place.note("d", f"{half} training + {half} generation GPUs: 4 + 4 need 8")
    from benchmarks.many_gpus.leads import run_leads  # torch, and seconds

    asyncio.run(run_leads(str(recipe), {lead: place.out / f"{APART}-{lead}" for lead in LEADS}))
    return 0


def write_recipe(place: Place, name: str, *, writing: int, training: int) -> Path:
    """A recipe and its model. `writing` and `training`: GPUs that do."""
    recipe = recipe_of(place, name, writing, training)
    path = place.out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    if not (place.scratch / "model" / "config.json").exists():
        shape = "tiny" if place.cpu else "qwen2-1.5b"
        saves = get_context("spawn").Process(target=save_model, args=(shape, place.device, place.scratch / "model"))
        saves.start()  # a process of its own: it gives back what it takes of a GPU
        saves.join()
        if saves.exitcode:
            raise RuntimeError(f"the model of {shape} could not be saved in {place.out}")
    return path


def recipe_of(place: Place, name: str, writing: int, training: int) -> dict[str, Any]:
    """The quickstart's prompts and rewards for a model that knows nothing: it writes until it may write no more."""
    samples, length = (4, 16) if place.cpu else (SAMPLES, LENGTH)
    prompts = samples * writing // GROUP
    model = {
        "precision": "float32" if place.cpu else "bfloat16",
        "activation_checkpointing": "none" if place.cpu else "selective",
        "sequence_packing": {"train_mb_tokens": 128 if place.cpu else 16384},
        "parallel": {"keep_gathered": training > 1},
    }
    engine: dict[str, Any] = {"name": "transformers", "max_concurrent_samples": samples}
    if not place.cpu and importlib.util.find_spec("vllm") is not None:
        share = 0.5 if name == COLOCATED else 0.85
        engine = {"name": "vllm", "max_num_seqs": 2 * SAMPLES, "gpu_memory_utilization": share}
    own = {"enabled": False, "resources": {"gpus_per_node": writing}} if name == APART else {"enabled": True}
    return {
        "defaults": "quickstart",
        "name": name,
        "run_dir": str(place.out / name),
        "ppo": {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": GROUP,
            "max_num_steps": steps_of(0)[0],
        },
        "policy": {
            "model_name": str(place.scratch / "model"),
            "train_global_batch_size": max(1, prompts * GROUP // MINI_BATCHES),
            "max_total_sequence_length": length + 64,
            "optimizer": {"lr": 1e-6},
            "generation": {"max_new_tokens": length, "engine": engine, "colocated": own},
            **model,
        },
        "value": {"optimizer": {"lr": 1e-5}, **model},
        "data": {"validation": None},
        "checkpointing": {"enabled": False},
        "logger": {"console": "lines", "tensorboard": False},
        "cluster": {
            "launch": "ray",
            "gpus_per_node": place.gpus,
            "device": place.device,
            "ray": {"weight_transfer": "ipc" if name == COLOCATED else "collective"},
            **({"num_threads": 1} if place.cpu else {}),
        },
    }


def save_model(shape: str, device: str, directory: Path) -> None:
    """Random weights with the quickstart's tokenizer, whose ids are the first ones of the model's vocabulary."""
    import torch

    from benchmarks.trained_model import Job, fresh_model
    from tandem.launch.models import QUICKSTART, location

    job = Job(shape, 0, 0, "bfloat16", steps=0, warmup=0, device=device)
    fresh_model(job, torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy(Path(location(QUICKSTART)) / name, directory / name)
