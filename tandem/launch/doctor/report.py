"""All checks one after the other, as a table that grows, and the exit code."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tandem.launch.doctor.cycle import cycle
from tandem.launch.doctor.findings import STYLES, Finding
from tandem.launch.doctor.machine import machine
from tandem.launch.doctor.packages import packages

WIDTH = 19


def doctor(recipe: str | None, overrides: list[str], *, run: bool, console: Console) -> int:
    """Look at this machine, for a recipe if one is given. 1 where something is broken that is needed, else 0."""
    directory, extras = Path("runs"), set()
    if recipe:
        from tandem.launch.doctor.wanted import wanted_by  # what it imports may be what is broken

        directory, extras = wanted_by(recipe, overrides)
    findings = []
    for finding in examine(directory, extras, run=run):
        findings.append(finding)
        console.print(line_of(finding), soft_wrap=True)
    broken = [finding for finding in findings if finding.state == "broken" and finding.needed]
    worries = [finding for finding in findings if finding.fix and finding not in broken]
    if broken:
        console.print(
            f"\n{len(broken)} needed and broken: {', '.join(finding.thing for finding in broken)}", style="red"
        )
    elif worries:
        console.print(f"\nfine, but look at: {', '.join(finding.thing for finding in worries)}")
    else:
        console.print("\nall is well")
    return 1 if broken else 0


def examine(directory: Path, extras: Collection[str], *, run: bool) -> Iterator[Finding]:
    """Cheap things first; the step last, which needs them all."""
    healthy = True
    for finding in chain(machine(directory), packages(extras)):
        healthy = healthy and not (finding.state == "broken" and finding.needed)
        yield finding
    if run and healthy:
        yield cycle()
    elif run:
        yield Finding("one step", "absent", "not tried: mend what is broken first")


def line_of(finding: Finding) -> Text:
    """A thing, how it is, what was found, and below it what to do."""
    text = Text(f"{finding.thing:<{WIDTH}} ")
    text.append(f"{finding.state:<8} ", STYLES[finding.state])
    text.append(finding.says)
    if finding.fix:
        text.append(f"\n{'':<{WIDTH}} {'':<8} -> {finding.fix}")
    return text
