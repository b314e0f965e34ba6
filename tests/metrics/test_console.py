"""The display: readable at 80 and 120 columns, quiet when it is off, and lines where there is no terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tandem.metrics.console import Display
from tandem.metrics.figures import clock, header_of, sparkline

RECORD = {
    "rollout/reward": 0.625,
    "critic/explained_variance": 0.41,
    "actor/approx_kl": 0.0021,
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "speed/tokens_per_s": 12345.0,
    "time/step_s": 0.914,
}


class Shown:
    """A display, what it has written, and a clock that only moves when told."""

    def __init__(self, mode, *, width=80, terminal=False):
        self.file = io.StringIO()
        self.now = 0.0
        console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
        self.display = Display(mode, console=console, clock=lambda: self.now)

    def train(self, steps, record=RECORD):
        self.display.write(0, {"val/accuracy": 0.16})
        for step in range(1, steps + 1):
            self.now += 1.0
            self.display.write(step, record | {"rollout/reward": 0.4 + 0.02 * step})
        self.display.write(steps, {"val/accuracy": 0.812})

    @property
    def text(self):
        return self.file.getvalue()


def test_without_a_terminal_live_becomes_one_line_a_step():
    shown = Shown("live")
    assert shown.display.mode == "lines"
    shown.display.start(40, "a run")
    shown.train(25)
    lines = shown.text.splitlines()
    assert lines[:2] == ["a run", "validation at step 0: accuracy 0.160"]
    assert lines[2] == header_of()
    assert lines[3].split() == ["1/40", "0.420", "0.160", "0.410", "0.0021", "0.5/1", "12.3k", "0.91", "0:39"]
    assert lines.count(header_of()) == 2
    assert lines[-1] == "validation at step 25: accuracy 0.812"
    assert {len(line) for line in lines if "/40" in line} == {len(header_of())}
    assert max(map(len, lines)) <= 80
    assert shown.text.isascii()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_every_figure_whole(width):
    shown = Shown("live", width=width, terminal=True)
    shown.display.start(40, "a run")
    shown.train(20)
    shown.display.close()
    picture = shown.text[shown.text.rindex("╭") :]
    for figure in (
        "a run", "step 20/40", "50%", "0.800  ▁", "0.160 → 0.812", "explained variance", "0.410", "0.0021",
        "0.5 mean, 1 max", "12.3k tokens/s", "0.91 s", "time left", "0:20",
    ):  # fmt: skip
        assert figure in picture
    assert "…" not in picture
    assert max(len(line) for line in picture.splitlines()) <= width


def test_what_is_not_known_yet_is_a_dash():
    shown = Shown("lines")
    shown.display.start(10, "a run")
    shown.display.write(1, {"rollout/reward": float("nan"), "actor/approx_kl": 2e-5})
    assert shown.text.splitlines()[-1].split() == ["1/10", "nan", "-", "-", "2.0e-05", "-", "-", "-", "0:00"]


def test_off_says_nothing():
    shown = Shown("silent", terminal=True)
    shown.display.start(40, "a run")
    shown.train(3)
    shown.display.note("a note")
    shown.display.summary(Path("runs/a"), ["try"])
    assert shown.text == ""


@pytest.mark.parametrize(("mode", "terminal"), [("live", True), ("lines", False)])
def test_the_summary_tells_before_and_after_where_and_what_next(mode, terminal):
    shown = Shown(mode, terminal=terminal)
    shown.display.start(20, "a run")
    shown.train(20)
    shown.display.note("checkpoint saved [step 20]")
    shown.display.summary(Path("runs") / "a", ["tandem train quickstart ppo.gae_lambda=[0.9]"])
    end = shown.text[shown.text.rindex("Done") :].splitlines()
    assert end[0] == "Done: 20 of 20 steps in 0:20"
    assert "0.160 -> 0.812" in end[1]
    assert "0.420 -> 0.800" in end[2]
    assert end[3].split() == ["files", str(Path("runs") / "a")]
    assert end[4:6] == ["Try next", "  tandem train quickstart ppo.gae_lambda=[0.9]"]
    assert "checkpoint saved [step 20]" in shown.text


def test_a_resumed_run_counts_its_pace_from_where_it_began_and_keeps_the_first_accuracy():
    shown = Shown("lines")
    shown.display.start(40, "a run", first_step=20, accuracy_before=0.1)
    shown.now = 2.0
    shown.display.write(21, RECORD | {"val/accuracy": 0.9})
    assert shown.text.splitlines()[-1].split()[-1] == "0:38"
    shown.display.summary(Path("runs/a"))
    assert "Stopped: 21 of 40 steps" in shown.text
    assert "0.100 -> 0.900" in shown.text


def test_sparklines_and_clocks():
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([3, 0, 1], 2) == "▁█"
    assert sparkline([1, float("nan"), 1], 8) == "▁ ▁"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 0) == ""
    assert [clock(s) for s in (0, 36.4, 725, 3723)] == ["0:00", "0:36", "12:05", "1:02:03"]
