"""Pure parts of a report: thinning, calibration, what a token view says, timelines."""

from __future__ import annotations

import json
import runpy
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")

from tandem.report import charts
from tandem.report.flight import Sample, calibration, chosen, explained_variance
from tandem.report.html import cell, escape, short
from tandem.report.run import differences, flat, read_lines
from tandem.report.timeline import Span, blocks_of, spans_of
from tandem.report.tokens import columns_of, sample_of, view_of


def test_thinning_keeps_spikes_and_ends():
    y = [0.0] * 10_000
    y[4321], y[7777] = 5.0, -3.0
    x, thinned = charts.thin(range(10_000), y)
    assert len(x) <= charts.MOST_POINTS + 2
    assert (x[0], x[-1]) == (0, 9999)
    assert {(4321, 5.0), (7777, -3.0)} <= set(zip(x, thinned, strict=True))
    assert x == sorted(x)
    assert charts.thin([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_a_chart_is_an_element_coloured_by_the_page():
    drawing = charts.lines([charts.Line("a", [0, 1, 2], [0.00012, 0.00034, 0.0002], 1)])
    assert drawing.startswith('<svg viewBox="0 0 331.2 180"')
    assert "var(--s1)" in drawing
    assert "#0102" not in drawing
    assert "<?xml" not in drawing
    assert ">0.00030<" in drawing  # digits of words are kept
    assert drawing == charts.lines([charts.Line("b", [0, 1, 2], [0.00012, 0.00034, 0.0002], 1)])


@pytest.mark.parametrize("name", ["<img src=x>&", "$\\frac{$", "文字"])
def test_hostile_names_are_text_in_a_chart(name: str):
    drawing = charts.bars([name], [[1.0]], x_label="s")
    assert escape(name).replace("&quot;", '"') in drawing
    assert "<img" not in drawing


def test_a_histogram_of_whole_numbers_has_a_bin_for_each():
    drawing = charts.histogram([(0, np.array([0, 1, 1, 3]))], x_label="versions")
    assert [f">{number}<" in drawing for number in (0, 1, 2, 3)] == [True] * 4
    alone = charts.histogram([(0, np.array([2, 2]))], x_label="versions")
    assert ">2<" in alone
    assert ">2.0<" not in alone
    charts.histogram([(0, np.array([0.5, 0.25])), (1, np.array([0.75]))], x_label="share")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"pip install 'tandem-rl\[report\]'"):
        runpy.run_path(str(charts.__file__))


def test_calibration_is_the_mean_of_equal_shares():
    values, returns = np.array([0.1, 0.9, 0.2, 0.8]), np.array([0.0, 1.0, 0.5, 1.0])
    x, y = calibration(values, returns, bins=2)
    np.testing.assert_allclose(x, [0.15, 0.85])
    np.testing.assert_allclose(y, [0.25, 1.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(values, np.ones(4)) is None


def test_samples_are_chosen_for_what_they_show():
    def cell_of(reward: float, advantage: float, length: int) -> dict[str, np.ndarray]:
        return {"reward": np.array(reward), "advantages": np.array([advantage]), "mask": np.ones(length, bool)}

    brief = {
        1: cell_of(0, 0.1, 2),
        2: cell_of(1, 0.2, 2),
        3: cell_of(0.5, -3, 2),
        4: cell_of(0.5, 0, 9),
        5: cell_of(0.5, 0, 1),
    }
    assert chosen(brief) == {
        2: "highest reward",
        1: "lowest reward",
        3: "largest advantage",
        4: "longest",
        5: "in order",
    }
    assert chosen({}) == {}


def row() -> dict[str, np.ndarray]:
    """A prompt of two tokens and three of the policy's, the last of which is not trained on."""
    return {
        "tokens": np.array([1, 2, 3, 4, 5]),
        "mask": np.array([False, False, True, True, True]),
        "versions": np.array([-1, -1, 4, 4, 5], dtype=np.int32),
        "weights": np.array([0, 0, 1, 1, 0], dtype=np.float32),
        "advantages": np.array([0, 0, 2, -1, 0], dtype=np.float32),
        "old_logprobs": np.array([0, 0, -1, -2, -3], dtype=np.float32),
        "gen_logprobs": np.array([0, 0, -1, -2.5, -3], dtype=np.float32),
        "ref_logprobs": np.array([0, 0, -1, -3, -3], dtype=np.float32),
        "epoch_0/actor/ratio": np.array([0, 0, 1, 1, 0], dtype=np.float32),
        "epoch_0/actor/clip": np.array([0, 0, 0, 1, 0], dtype=np.int8),
        "epoch_1/actor/ratio": np.array([0, 0, np.e, 1, 0], dtype=np.float32),
        "epoch_1/actor/clip": np.array([0, 0, 0, 0, 0], dtype=np.int8),
    }


def test_the_columns_of_a_token():
    found = columns_of(row())
    none = np.nan
    np.testing.assert_allclose(found["log ratio"], [none, none, 1, 0, none], atol=1e-6)
    np.testing.assert_allclose(found["clipped"], [none, none, 0, 1, none])  # in some epoch
    np.testing.assert_allclose(found["KL of the update"], [none, none, np.e - 2, 0, none], atol=1e-6)
    np.testing.assert_allclose(found["KL to the reference"], [none, none, 0, np.exp(-1), 0], atol=1e-6)
    np.testing.assert_allclose(found["engine gap"], [none, none, 0, 0.5, 0])
    np.testing.assert_allclose(found["version"], [none, none, 4, 4, 5])
    assert "value" not in found


def test_a_long_sample_keeps_the_end_of_its_prompt_and_says_what_is_left_out():
    long = {name: np.concatenate([np.repeat(column[:1], 100), column]) for name, column in row().items()}
    found = sample_of(Sample("r", 1, "p", "longest", 1.0, long), None, room=4)
    assert found["before"] == 100
    assert found["after"] == 1
    assert found["ids"] == [1, 2, 3, 4]
    assert found["wrote"] == [0, 0, 1, 1]


def test_the_view_cannot_end_its_element():
    text = view_of(
        [Sample("</script>", 1, "<!--", "&", float("nan"), row())], {"</script>": lambda ids: ["</script>"] * len(ids)}
    )
    assert not set("<>&") & set(text)
    assert json.loads(text)["samples"][0]["text"] == ["</script>"] * 5
    assert json.loads(text)["samples"][0]["reward"] is None


def test_spans_and_blocks():
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "actor"}},
        {"ph": "X", "name": "actor/infer", "pid": 1, "ts": 1e6, "dur": 1e6},
        {"ph": "X", "name": "actor/infer", "pid": 1, "ts": 2e6, "dur": 1e6},
        {"ph": "X", "name": "actor/infer", "pid": 1, "ts": 9e6, "dur": 1e6},
        {"ph": "X", "name": "torn", "pid": 1},
    ]
    spans = spans_of(events)
    assert spans[0] == Span("actor", "actor/infer", 1.0, 2.0)
    assert len(spans) == 3
    blocks = blocks_of(spans, {"actor": 2}, {"actor/infer": 0}, (0.0, 9.5))
    assert blocks == [charts.Block(0, 1.0, 3.0, 2), charts.Block(0, 9.0, 9.5, 2)]


def test_lines_and_configs(tmp_path):
    file, notes = tmp_path / "a.jsonl", []
    file.write_text('[\n{"a": 1},\n{"b": 2}\n3\n{"c"')
    assert read_lines(file, notes) == [{"a": 1}, {"b": 2}]
    assert notes == ["a.jsonl: 2 torn lines left out"]
    assert flat({"a": {"b": None, "c": {}}, "d": "x"}) == {"a.b": "null", "a.c": "{}", "d": '"x"'}
    assert differences([]) == []


def test_numbers_in_cells():
    assert short(0.123456) == "0.1235"
    assert short(1234567.0) == "1,234,567"
    assert short(None) == "-"
    assert cell("severe", False) == '<td class="severe">severe</td>'
    assert cell(0.5, False) == '<td class="n">0.5</td>'
