"""The page: its sections in order, with style and script inside and nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from tandem.report import sections
from tandem.report.flight import Decode, Flight, read_flight
from tandem.report.html import escape, paragraph, section
from tandem.report.run import Run, read_runs
from tandem.report.timeline import timeline_section
from tandem.report.tokens import view_of

# Name of a section -> what the page's head calls it.
SECTIONS = {
    "overview": "overview",
    "verdicts": "verdicts",
    "curves": "curves",
    "rewards": "rewards",
    "critic": "critic",
    "staleness": "staleness",
    "lengths": "lengths",
    "samples": "samples",
    "tokens": "tokens",
    "timeline": "timeline",
    "stages": "stages",
    "memory": "memory",
    "drops": "drops",
    "config": "config",
    "metrics": "every metric",
}


def make_page(paths: Sequence[Path], decoder_of: Callable[[Run], Decode]) -> str:
    """The report of these run directories. `decoder_of` gives what turns ids into text, or raises ValueError."""
    runs = read_runs(paths)
    flights = [read_flight(run) for run in runs]
    decoders = {run.name: decoder(run, flight, decoder_of) for run, flight in zip(runs, flights, strict=True)}
    parts = parts_of(runs, flights, decoders)
    title = ", ".join(run.name for run in runs)
    links = "".join(f'<a href="#{name}">{escape(word)}</a>' for name, word in SECTIONS.items())
    style, script = (files("tandem.report").joinpath(name).read_text(encoding="utf-8") for name in ASSETS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Even if a text slipped through: nothing is fetched, and no script runs but this one.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Tandem</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>\n"
        f"{chr(10).join(parts[name] for name in SECTIONS)}\n<script>{script}</script></body></html>\n"
    )


ASSETS = ("page.css", "page.js")


def decoder(run: Run, flight: Flight, decoder_of: Callable[[Run], Decode]) -> Decode | None:
    """What turns ids into text, where there are samples to show; None, and a note, where it cannot be had."""
    if not flight.samples:
        return None
    try:
        return decoder_of(run)
    except ValueError as error:
        run.notes.append(f"tokens are shown as ids: {error}")
        return None


def parts_of(runs: Sequence[Run], flights: Sequence[Flight], decoders: Mapping[str, Decode | None]) -> dict[str, str]:
    """Every section by name."""
    record = "Histograms need a flight record (logger.flight_recorder={})."
    staleness = sections.distribution(
        "Versions behind, by token", runs, [flight.staleness for flight in flights], "versions"
    )
    lengths = sections.distribution(
        "Tokens that the policy wrote, by sample", runs, [flight.lengths for flight in flights], "tokens"
    )
    curves = sections.curves_section
    return {
        "overview": sections.overview(runs),
        "verdicts": sections.verdicts(runs),
        "curves": curves("curves", "Curves", runs, sections.CURVES, none="metrics.jsonl holds none of them."),
        "rewards": curves("rewards", "Rewards", runs, sections.REWARDS, none="metrics.jsonl holds no reward."),
        "critic": sections.critic(runs, flights),
        "staleness": curves("staleness", "Staleness", runs, sections.STALENESS, *staleness, none=record),
        "lengths": curves("lengths", "Lengths", runs, sections.LENGTHS, *lengths, none=record),
        "samples": sections.samples(runs),
        "tokens": tokens(flights, decoders),
        "timeline": timeline_section(runs),
        "stages": sections.stages(runs),
        "memory": curves("memory", "Memory and traffic", runs, sections.MEMORY, none="No memory was measured."),
        "drops": sections.drops(runs),
        "config": sections.config(runs),
        "metrics": sections.every_metric(runs),
    }


def tokens(flights: Sequence[Flight], decoders: Mapping[str, Decode | None]) -> str:
    """The token view, or what would make one."""
    samples = [sample for flight in flights for sample in flight.samples]
    if not samples:
        none = "There is no flight record: train with logger.flight_recorder={} to look at single tokens."
        return section("tokens", "Token by token", paragraph(none))
    view = (
        '<div class="controls"><label>sample <select id="tokens-sample"></select></label>'
        '<label>colour <select id="tokens-column"></select></label></div>'
        '<p id="tokens-facts"></p><div id="tokens-scale"></div><div id="tokens-text"></div><div id="tokens-one"></div>'
        f'<script type="application/json" id="tokens-data">{view_of(samples, decoders)}</script>'
    )
    return section("tokens", "Token by token", view)
