"""Which packages are there, in which versions, and whether they can be imported: needed ones, and extras."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import Requirement

from tandem.launch.doctor.findings import Finding

PACKAGE = "tandem-rl"
TIMEOUT_S = 300.0  # of all imports of one process: vLLM's take a minute on a slow disk
GIB = 1 << 30
# Where a package's module has another name.
MODULES = {
    "pyyaml": "yaml",
    "megatron-core": "megatron.core",
    "transferqueue": "transfer_queue",
    "mlflow-skinny": "mlflow",
}


@dataclass
class Probed:
    """What the imports of one process came to. `gpus` is torch's answer."""

    errors: dict[str, str] = field(default_factory=dict)
    gpus: dict[str, object] | None = None


def packages(wanted_extras: Collection[str]) -> Iterator[Finding]:
    """Needed packages, GPUs, then extras; an extra is needed where it is wanted."""
    try:
        required = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        fix = f"uv sync in its folder, or uv pip install {PACKAGE}: versions and extras can be looked at then"
        yield Finding("tandem", "warning", "runs from a folder and is not installed", fix)
        return
    applies = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    yield Finding("tandem", "ok", metadata.version(PACKAGE))
    modules = [module_of(requirement) for requirement in applies]
    probed = probe([module for module in modules if is_there(module)])
    for requirement, module in zip(applies, modules, strict=True):
        yield finding_of(requirement, probed.errors.get(module), f"uv pip install --reinstall '{plain(requirement)}'")
    if probed.gpus is not None:
        yield gpus(probed.gpus)
    for extra in sorted(set(metadata.metadata(PACKAGE).get_all("Provides-Extra") or [])):
        own = [r for r in required if r not in applies and r.marker and r.marker.evaluate({"extra": extra})]
        for requirement in own:
            yield extra_finding(extra, requirement, needed=extra in wanted_extras)


def extra_finding(extra: str, requirement: Requirement, *, needed: bool) -> Finding:
    """Present, missing or broken."""
    fix = f"uv sync --extra {extra} in a checkout, else uv pip install '{PACKAGE}[{extra}]'"
    module = module_of(requirement)
    if not is_there(module):
        state, says = ("broken", "missing, and wanted") if needed else ("absent", "not installed")
        return Finding(f"extra {extra}", state, says, fix if needed else "", needed)
    found = finding_of(
        requirement, probe([module]).errors.get(module), f"uv pip install --reinstall '{plain(requirement)}'"
    )
    return Finding(f"extra {extra}", found.state, f"{requirement.name} {found.says}", found.fix, needed)


def finding_of(requirement: Requirement, error: str | None, fix: str) -> Finding:
    """`error` is what the import said: "" where it worked, None where there was nothing to import."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        if error is None:
            return Finding(requirement.name, "broken", "missing", fix)
        version = "of unknown version"
    if error is None:
        return Finding(requirement.name, "broken", f"{version} is listed, but its module is missing", fix)
    if error:
        return Finding(requirement.name, "broken", f"{version} cannot be imported: {error}", fix)
    if version[0].isdigit() and not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "broken", f"{version}, wanted {requirement.specifier}", fix)
    return Finding(requirement.name, "ok", version)


def plain(requirement: Requirement) -> str:
    """Without its marker, as pip takes it."""
    return f"{requirement.name}{requirement.specifier}"


def module_of(requirement: Requirement) -> str:
    """The module that a package is imported by."""
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    return MODULES.get(name, name.replace("-", "_"))


def is_there(module: str) -> bool:
    """Whether there is something to import. Looks, and imports nothing of it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def probe(modules: Sequence[str]) -> Probed:
    """Import these in a process of their own; one that ends the process has what comes after it tried again."""
    found, left = Probed(), list(modules)
    while left:
        command = [sys.executable, "-m", "tandem.launch.doctor.probe", *left]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            lines, end = done.stdout.splitlines(), f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text = output.decode() if isinstance(output, bytes) else output
            lines, end = text.splitlines(), f"not done after {TIMEOUT_S:.0f} s"
        last = take(found, lines)
        if last is None:
            break
        found.errors[last or left[0]] = end
        left = left[left.index(last or left[0]) + 1 :]
    return found


def take(found: Probed, lines: Sequence[str]) -> str | None:
    """Read a probe's lines. The module that was being imported at their end, "" if none began, None if all are done."""
    begun = ""
    for line in lines:
        answer = json.loads(line)
        if "begins" in answer:
            begun = answer["begins"]
            continue
        found.errors[answer["name"]] = answer["error"]
        found.gpus = answer.get("gpus", found.gpus)
    return begun if not begun or begun not in found.errors else None


def gpus(found: dict[str, object]) -> Finding:
    """What torch can compute on."""
    there, cuda = found["there"], found["cuda"]
    assert isinstance(there, list), "see probe.gpus"
    driver = driver_gpus()
    if there:
        words = [f"{name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free" for name, total, free in there]
        says = f"{len(there)} (CUDA {cuda}): {'; '.join(dict.fromkeys(words))}"
        if any(free < total / 2 for _, total, free in there):
            return Finding("GPUs", "warning", says, "other processes hold half of a GPU's memory: see nvidia-smi")
        return Finding("GPUs", "ok", says)
    if driver:
        reason = found["error"] or (
            "CUDA_VISIBLE_DEVICES hides them, or the driver is too old" if cuda else "a CPU build"
        )
        fix = "install a torch for this driver's CUDA (nvidia-smi names it), and look at CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", "broken", f"the driver has {driver}, torch sees none: {reason}", fix)
    return Finding("GPUs", "absent", "none: runs compute on the CPU")


def driver_gpus() -> str:
    """How many GPUs the driver lists, in words; "" where there is no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    count = len(done.stdout.splitlines()) if done.returncode == 0 else 0
    return f"{count} GPU{'s' * (count > 1)}" if count else ""
