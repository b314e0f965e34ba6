"""The token view: samples of flight records as data for the page's script, which draws every text as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tandem.report.flight import TOKENS, Decode, Row, Sample

DIVERGING, SEQUENTIAL, FLAGS = "diverging", "sequential", "flags"
# Column of the view -> how it is coloured, and what it is.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "advantage": (DIVERGING, "what the policy's loss weighed the token by"),
    "value": (SEQUENTIAL, "the critic's estimate before the token"),
    "return": (SEQUENTIAL, "what the critic learned towards"),
    "log ratio": (DIVERGING, "log-prob when it learned less log-prob when the step began; 0 at a ratio of 1"),
    "clipped": (FLAGS, "1: its gradient was clipped away, 2: by the dual clip"),
    "KL of the update": (SEQUENTIAL, "ratio - 1 - log ratio, Schulman's k3"),
    "KL to the reference": (SEQUENTIAL, "k3 of the reference's log-prob against the policy's"),
    "engine gap": (DIVERGING, "trainer's log-prob less the engine's, of the same token"),
    "log-prob": (SEQUENTIAL, "the policy's when the step began"),
    "entropy": (SEQUENTIAL, "of the policy's choice when it learned, in nats"),
    "version": (SEQUENTIAL, "the policy's version that drew the token"),
}


def columns_of(row: Row) -> dict[str, np.ndarray]:
    """The columns of the view that a recorded row has, float64, NaN where a token has none. Last epoch that learned."""
    mask = row["mask"].astype(bool)
    epochs = sorted({name.split("/")[0] for name in row if name.endswith("/actor/ratio")})
    found: dict[str, np.ndarray] = {}

    def keep(name: str, column: np.ndarray, where: np.ndarray = mask) -> None:
        found[name] = np.where(where, column.astype(np.float64), np.nan)

    learned = mask & (row["weights"] != 0) if "weights" in row else mask
    for name, column in (("advantage", "advantages"), ("value", "values"), ("return", "returns")):
        if column in row:
            keep(name, row[column])
    if epochs:
        ratio = row[f"{epochs[-1]}/actor/ratio"].astype(np.float64)
        learned = learned & (ratio > 0)
        log_ratio = np.log(np.where(ratio > 0, ratio, 1.0))
        keep("log ratio", log_ratio, learned)
        clips = [row[f"{epoch}/actor/clip"] for epoch in epochs if f"{epoch}/actor/clip" in row]
        if clips:
            keep("clipped", np.max(clips, axis=0), learned)
        keep("KL of the update", np.expm1(log_ratio) - log_ratio, learned)
        if f"{epochs[-1]}/actor/entropy" in row:
            keep("entropy", row[f"{epochs[-1]}/actor/entropy"], learned)
    if {"ref_logprobs", "old_logprobs"} <= row.keys():
        gap = row["ref_logprobs"].astype(np.float64) - row["old_logprobs"]
        keep("KL to the reference", np.expm1(gap) - gap)
    if {"gen_logprobs", "old_logprobs"} <= row.keys():
        keep("engine gap", row["old_logprobs"].astype(np.float64) - row["gen_logprobs"])
    if "old_logprobs" in row:
        keep("log-prob", row["old_logprobs"])
    keep("version", row["versions"])
    return {name: found[name] for name in COLUMNS if name in found}


def view_of(samples: Sequence[Sample], decoders: Mapping[str, Decode | None]) -> str:
    """The data of the view as JSON that cannot end its element: no `<`, `>` or `&` in it."""
    room = TOKENS // max(len(samples), 1)
    shown = [sample_of(sample, decoders[sample.run], room) for sample in samples]
    data = {"columns": {name: {"kind": kind, "what": what} for name, (kind, what) in COLUMNS.items()}, "samples": shown}
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def sample_of(sample: Sample, decode: Decode | None, room: int) -> dict[str, object]:
    """One sample: its first `room` tokens, after as much of a long prompt has been left out as leaves half of them."""
    mask = sample.row["mask"].astype(bool)
    total = len(mask)
    response = int(mask.argmax()) if mask.any() else total
    begin = max(0, min(response - room // 2, total - room))
    kept = slice(begin, begin + room)
    ids = [int(token) for token in sample.row["tokens"][kept]]
    columns = {name: [rounded(value) for value in column[kept]] for name, column in columns_of(sample.row).items()}
    engine, attempt = (int(sample.row[name]) if name in sample.row else None for name in ("engine", "attempt"))
    return {
        "run": sample.run,
        "step": sample.step,
        "prompt": sample.prompt_id,
        "why": sample.why,
        "reward": rounded(sample.reward),
        "engine": engine,
        "attempt": attempt,
        "before": begin,
        "after": max(0, total - begin - room),
        "wrote": [int(wrote) for wrote in mask[kept]],
        "text": decode(ids) if decode else [f"{token} " for token in ids],
        "ids": ids,
        "columns": columns,
    }


def rounded(value: float) -> float | None:
    """Four digits; None for what is no finite number."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
