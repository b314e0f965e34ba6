"""Imports packages in a process of its own, so that one that is broken, or that crashes, is a finding and no end.

    python -m tandem.launch.doctor.probe MODULE [MODULE ...]

Prints a line of JSON before and after each import; with torch also the GPUs that it sees.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings


def main(names: list[str]) -> None:
    """One after the other. What a package itself prints goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for name in names:
        answers.write(json.dumps({"begins": name}) + "\n")
        answers.flush()
        answers.write(json.dumps(tried(name)) + "\n")
        answers.flush()


def tried(name: str) -> dict[str, object]:
    """What came of an import. Whatever a broken package raises is its finding."""
    try:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)
            more = {"gpus": gpus()} if name == "torch" else {}
    except BaseException as error:
        return {"name": name, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return {"name": name, "error": "", **more}


def gpus() -> dict[str, object]:
    """What torch was built for, and the GPUs that it can use: name, bytes in all, bytes free."""
    import torch

    found: dict[str, object] = {"cuda": torch.version.cuda, "error": "", "there": []}
    try:
        if torch.cuda.is_available():
            numbers = range(torch.cuda.device_count())
            free = [torch.cuda.mem_get_info(i)[0] for i in numbers]
            there = [torch.cuda.get_device_properties(i) for i in numbers]
            found["there"] = [(gpu.name, gpu.total_memory, left) for gpu, left in zip(there, free, strict=True)]
    except RuntimeError as error:
        found["error"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
