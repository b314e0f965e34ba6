"""`tandem report`: one HTML file about runs. Here: the tokenizer of a run, and where the file goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rich.console import Console

from tandem.report.flight import Decode
from tandem.report.page import make_page
from tandem.report.run import Run

NAME = "report.html"


def report(runs: Sequence[str], out: Path | None) -> None:
    """Write the report: `out`, or report.html in the directory of a single run, or here for several."""
    paths = [Path(run).expanduser() for run in runs]
    page = make_page(paths, decoder_of)
    file = out or (paths[0] / NAME if len(paths) == 1 else Path(NAME))
    if file.is_dir():
        raise ValueError(f"{file} is a directory; give the file to write with --out FILE")
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error.strerror}); choose another with --out FILE") from error
    console = Console(highlight=False)
    console.print(f"{file}  ({len(page.encode()) / 1e6:.2f} MB; open it in a browser)", soft_wrap=True, markup=False)


def decoder_of(run: Run) -> Decode:
    """The run's tokenizer, if it is on this machine. Code that comes with a model is never run for a report."""
    policy = run.config.get("policy")
    if not isinstance(policy, dict):
        raise ValueError("its config names no policy")
    tokenizer = policy.get("tokenizer")
    name = (tokenizer.get("name") if isinstance(tokenizer, dict) else None) or policy.get("model_name")
    if not isinstance(name, str):
        raise ValueError("its config names no model")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: a report needs no network
    from tandem.launch.models import load_tokenizer

    known = load_tokenizer(name, trust_remote_code=False)

    @lru_cache(maxsize=100_000)
    def piece(before: int | None, token: int) -> str:
        """What a token adds to the text behind another: some tokenizers drop a leading space of the first."""
        alone = str(known.decode([token]))
        if before is None:
            return alone
        first, both = str(known.decode([before])), str(known.decode([before, token]))
        return both[len(first) :] if both.startswith(first) else alone

    def decode(ids: Sequence[int]) -> list[str]:
        return [piece(before, token) for before, token in zip([None, *ids[:-1]], ids, strict=True)]

    return decode
