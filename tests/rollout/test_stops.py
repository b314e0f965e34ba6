"""Where a text comes to a stop string, with a real tokenizer."""

from __future__ import annotations

from functools import partial

import pytest

from tandem.data.chat import text_of
from tandem.launch.models import load_tokenizer
from tandem.rollout.rows import Row
from tandem.rollout.stops import StopStrings
from tandem.types import Sampling

TEXT = "She has 12 apples.\n\nThe answer is 55. Zoë said: naïve – 17 + 4 = 21. User: and then? The answer is 9."
TOKENIZER = load_tokenizer("quickstart", trust_remote_code=False)
DECODE = partial(text_of, TOKENIZER)


def row_of(text: str, *strings: str) -> Row:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    sampling = Sampling(max_new_tokens=200, temperature=1.0, seed=0, stop_token_ids=(), stop_strings=strings)
    return Row((1,), sampling, list(tokens), [0.0] * len(tokens))


def first_place(row: Row, *strings: str) -> int | None:
    """By its definition: the shortest beginning whose text holds one."""
    return next((n for n in range(len(row.tokens) + 1) if any(s in DECODE(row.tokens[:n]) for s in strings)), None)


@pytest.mark.parametrize(
    "strings",
    [
        ("\n\n",),
        ("answer is",),
        ("ë",),
        ("ïve –",),
        ("User:", "21"),
        ("is ",),
        (".",),
        ("none",),
        (" then? The answer",),
    ],
)
def test_a_row_ends_where_its_text_first_holds_a_string(strings: tuple[str, ...]):
    row = row_of(TEXT, *strings)
    found = StopStrings(DECODE, len(TOKENIZER)).length(row)
    assert found == first_place(row, *strings)
    assert (found is None) == (strings == ("none",))


def test_tokens_that_come_one_by_one_or_many_at_once_end_alike():
    whole, stops = row_of(TEXT, "naïve"), StopStrings(DECODE, len(TOKENIZER))
    at_once = stops.length(whole)
    grows, places = row_of("", "naïve"), []
    for token in whole.tokens:
        grows.tokens.append(token)
        places.append(stops.length(grows))
    assert [place for place in places if place is not None] == [at_once]


def test_a_row_that_begins_anew_is_searched_anew():
    row, stops = row_of(TEXT, "apples"), StopStrings(DECODE, len(TOKENIZER))
    tokens, found = list(row.tokens), stops.length(row)
    row.clear()
    row.tokens += tokens
    assert found == first_place(row, "apples")
    assert stops.length(row) == found
