"""`tandem report`: one file, nothing to fetch, every section, hostile text as text; what is missing is said."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")

from tandem.config.check import to_yaml
from tandem.launch.report import decoder_of, report
from tandem.metrics.timing import Timeline
from tandem.report.page import SECTIONS, make_page
from tandem.report.run import Run, read_run
from tests.e2e.runs import run, short_config

CHANGES = (
    "ppo.max_num_steps=2",
    "ppo.val_period=1",
    "data.validation={name: arithmetic, split: validation, size: 4}",
    "logger.flight_recorder={}",
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&'\""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Elements(HTMLParser):
    """Every element that the page opens, with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def all_of(page: str, tag: str) -> list[dict[str, str | None]]:
    return [attributes for found, attributes in Elements(page).found if found == tag]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with flight records, and hostile words where a run keeps answers, verdicts and untrained prompts."""
    run_dir = tmp_path_factory.mktemp("report") / "run"
    config = short_config(*CHANGES)
    run(config, run_dir)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    metrics = [
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "rollout/reward": 0.5, "rollout/component/<b>": 1.0, "time/step_s": 1.5, "time/actor/infer_s": 0.5},
        {"step": 2, "rollout/reward": 0.75, "critic/explained_variance": None, "time/step_s": 1.0, "val/accuracy": 0.5},
    ]
    lines(run_dir / "metrics.jsonl", metrics)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout/rew')  # cut off by a kill
    lines(run_dir / "health.jsonl", [remark("critic_lags", HOSTILE)])
    lines(run_dir / "untrained.jsonl", [{"index": 4, "id": "a", "why": "data_failure", "cause": HOSTILE}])
    timeline = Timeline(run_dir / "timeline.json")
    for span in ("rollout/in_flight", "control/wait_for_groups", "control/learn"):
        with timeline.span(span):
            pass
    timeline.close()
    answers = [{"id": "v:0", "sample": 0, "question": "2 < 3?", "answer": "yes", "response": HOSTILE, "reward": 0.0}]
    (run_dir / "validation").mkdir(exist_ok=True)
    lines(run_dir / "validation" / "step_000000.jsonl", answers)
    lines(run_dir / "validation" / "step_000002.jsonl", [{**answers[0], "response": "yes, it is", "reward": 1.0}])
    return run_dir


def lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def remark(verdict: str, text: str) -> dict[str, object]:
    return {"step": 2, "verdict": verdict, "severity": "severe", "change": "begins", "text": text}


def hostile_decoder(_: Run):
    """As if every token were an attack."""
    return lambda ids: [HOSTILE for _ in ids]


@pytest.fixture(scope="module")
def page(trained: Path) -> str:
    return make_page([trained], hostile_decoder)


def test_every_section_is_there_and_filled(page: str):
    assert [attributes["id"] for attributes in all_of(page, "section")] == list(SECTIONS)
    assert {attributes["href"] for attributes in all_of(page, "a")} == {f"#{name}" for name in SECTIONS}
    sections = {part.split('"')[0]: part for part in page.split('<section id="')[1:]}
    drawn = {name for name, part in sections.items() if "<svg" in part}
    assert {"curves", "rewards", "critic", "staleness", "lengths", "timeline", "stages"} <= drawn
    assert "rollout/in_flight" in sections["timeline"]
    assert "yes, it is" in sections["samples"]
    assert "critic_lags" in sections["verdicts"]
    assert "data_failure" in sections["drops"]
    assert "metrics.jsonl: 1 torn line left out" in sections["overview"]
    assert "0.25 → 0.5" in sections["overview"]
    assert "0:00:02" in sections["overview"]  # 2.5 s, to the even second
    assert "step 2: explained variance" in sections["critic"]


def test_hostile_text_is_text(page: str):
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=alert(2)&gt;") == 3  # an answer, a verdict, a cause
    kinds = [attributes.get("type") for attributes in all_of(page, "script")]
    assert kinds == ["application/json", None]  # the tokens' data, and our script


def test_nothing_is_fetched(page: str):
    fetching = [
        (tag, name) for tag, attributes in Elements(page).found for name in attributes if name in {"src", "action"}
    ]
    assert fetching == []
    assert not any(str(a.get("href", "#"))[:1] != "#" for _, a in Elements(page).found)
    policies = [attributes["content"] for attributes in all_of(page, "meta") if "http-equiv" in attributes]
    assert policies
    assert str(policies[0]).startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert len(page) < 3_000_000


def test_the_tokens_are_those_of_the_record(trained: Path):
    found = data_of(make_page([trained], decoder_of))
    first = found["samples"][0]
    assert first["step"] == 1
    assert {"advantage", "value", "log ratio", "clipped", "version", "engine gap"} <= first["columns"].keys()
    assert "".join(first["text"]).startswith("<|user|>")
    for name, column in first["columns"].items():
        assert len(column) == len(first["ids"]), name
        assert all(value is None for value, wrote in zip(column, first["wrote"], strict=True) if not wrote), name


def data_of(page: str) -> dict:
    text = page.split('id="tokens-data">')[1].split("</script>")[0]
    return json.loads(text)


def test_runs_are_drawn_over_each_other_and_their_configs_compared(trained: Path, tmp_path: Path):
    other = tmp_path / "run"  # of the same name
    other.mkdir()
    shutil.copy(trained / "metrics.jsonl", other)
    config = short_config(*CHANGES, "policy.optimizer.lr=0.125")
    (other / "config.yaml").write_text(to_yaml(config))
    page = make_page([trained, other], hostile_decoder)
    assert "run (2): rollout/reward" in page
    table = page.split('<section id="config">')[1].split("</table>")[0]
    assert "policy.optimizer.lr" in table
    assert "0.125" in table
    assert "ppo.max_num_steps" not in table


def test_a_run_of_which_little_is_left_is_reported(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = make_page([tmp_path], hostile_decoder)
    assert [attributes["id"] for attributes in all_of(page, "section")] == list(SECTIONS)
    for missing in ("no config.yaml", "no timeline.json", "no validation/", "no flight/"):
        assert missing in page


def test_torn_records_are_named(trained: Path, tmp_path: Path):
    torn = tmp_path / "torn"
    shutil.copytree(trained, torn)
    rows = torn / "flight" / "step_000001" / "rows.safetensors"
    rows.write_bytes(rows.read_bytes()[:100])
    (torn / "flight" / "step_000002" / "step.json").write_text("{")
    (torn / "config.yaml").write_text("a: [")
    page = make_page([torn], hostile_decoder)
    assert "flight/step_000001 cannot be read" in page
    assert "flight/step_000002 cannot be read" in page
    assert "config.yaml cannot be read" in page


def test_without_a_tokenizer_tokens_are_ids(trained: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (copy / "config.yaml").write_text("policy: {model_name: /no/such/model}\n")
    page = make_page([copy], decoder_of)
    assert "tokens are shown as ids: model" in page
    first = data_of(page)["samples"][0]
    assert first["text"] == [f"{token} " for token in first["ids"]]


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="neither config"):
        read_run(tmp_path, "x")
    with pytest.raises(ValueError, match="none does not exist; give the directory of a run"):
        make_page([tmp_path / "none"], hostile_decoder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; give the directory of a run"):
        make_page([tmp_path / "file"], hostile_decoder)


def test_the_file_lies_in_the_run_or_where_it_is_asked(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    report([str(trained)], None)
    report([str(trained)], tmp_path / "new" / "a.html")
    assert (trained / "report.html").read_text() == (tmp_path / "new" / "a.html").read_text()
    assert "report.html  (0." in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="choose another with --out"):
        report([str(trained)], tmp_path / "file" / "a.html")
    for directory in (tmp_path, Path()):
        with pytest.raises(ValueError, match="is a directory; give the file to write with --out"):
            report([str(trained)], directory)
    assert list(tmp_path.parent.glob("*.partial")) == []


def test_silence_of_the_health_watch_is_told_from_its_absence(trained: Path, tmp_path: Path):
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "health/critic_lags": 0.0}, {"step": 2, "health/critic_lags": 0.0}])
    assert "2 steps were judged, and none was worth a word" in make_page([tmp_path], hostile_decoder)
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "rollout/reward": 0.0}])
    both = make_page([tmp_path, trained], hostile_decoder)
    assert "no step was judged (logger.health.enabled=true watches a run)" in both
    assert "critic_lags" in both


def dom_of(page: str, tmp_path: Path, *, dark: bool = False) -> str:
    """The page's elements after its scripts have run."""
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(page)
    options = [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,2000",
        "--no-sandbox",
        "--disable-gpu",
    ]
    options += ["--blink-settings=preferredColorScheme=0"] * dark
    command = [CHROMIUM, "--headless=new", *options, "--virtual-time-budget=2000", "--dump-dom"]
    command.append((tmp_path / "page.html").as_uri())
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_runs_our_script_and_no_other(page: str, tmp_path: Path):
    """The tokens are drawn under the page's policy; a script that slipped in does not run: its digest is not there."""
    probe = "<script>document.title = 'attacked'</script>"
    dom = dom_of(page.replace("</body>", f"{probe}</body>"), tmp_path)
    assert "<title>run - Tandem</title>" in dom
    assert dom.count('<option value="') > 6
    drawn = dom.split('id="tokens-text">')[1].split('<div id="tokens-one"')[0]
    assert drawn.count("<span") > 10
    assert "background-color" in drawn
    assert "<img" not in drawn


# Opens what is folded and says how wide the page is, what sticks out of the window without a scrollbar of its own,
# and how bright paper, ink and a chart's words are.
MEASURE = """<script>addEventListener("load", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const every = (kind) => [...document.querySelectorAll(kind)];
  const box = (element) => element.getBoundingClientRect();
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const held = (element) => { for (let at = element; at; at = at.parentElement) if (scrolls(at)) return true; };
  const outside = every("body *").filter((element) => box(element).right > innerWidth + 0.5 && !held(element));
  const bright = (color) => color.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
  const style = getComputedStyle(document.body);
  parent.postMessage(JSON.stringify({
    window: innerWidth, page: document.documentElement.scrollWidth,
    outside: outside.map((element) => element.tagName + "." + element.className),
    charts: every("svg").length, flat: every("svg").filter((chart) => box(chart).height < 20).length,
    paper: bright(style.backgroundColor), ink: bright(style.color),
    words: bright(getComputedStyle(document.querySelector("svg text")).fill),
  }), "*");
});</script>"""
# A window of a browser is at least 500 pixels wide; a frame may be as narrow as a telephone.
FRAME = """<meta name="color-scheme" content="light dark"><title></title>
<script>addEventListener("message", (told) => { document.title = told.data; });</script>
<iframe src="framed.html" style="border: 0; width: WIDTHpx; height: 1900px"></iframe>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(page: str, tmp_path: Path, width: int, dark: bool):
    """With everything unfolded; a wide table scrolls in itself. Charts are drawn, and what is written can be read."""
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # it would forbid the measurement
    (tmp_path / "framed.html").write_text(free.replace("</body>", f"{MEASURE}</body>"))
    dom = dom_of(FRAME.replace("WIDTH", str(width)), tmp_path, dark=dark)
    found = json.loads(unescape(dom.split("<title>")[1].split("</title>")[0]))
    assert found["window"] == width
    assert found["outside"] == []
    assert found["page"] <= width
    assert found["charts"] == page.count("<svg")
    assert found["flat"] == 0
    assert (found["paper"] < 0.2) if dark else (found["paper"] > 0.9)
    assert abs(found["ink"] - found["paper"]) > 0.6
    assert abs(found["words"] - found["paper"]) > 0.6
