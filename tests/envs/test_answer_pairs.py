"""The table of answer pairs: what each verifier takes for right and for wrong."""

from pathlib import Path

import pytest
import yaml

from tandem.envs.verifiers import check_answers
from tests.envs.asking import ask_all, verifier_config

TABLE = Path(__file__).with_name("answer_pairs.txt")


def sections():
    """Section heading -> its (verdict, answer, response)."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            verdict, answer, response = (part.replace("⏎", "\n").replace("␣", " ") for part in line.split(" :: "))
            rows.append((verdict, answer, response))
    return found


PAIRS = sections()


def config_of(heading):
    name, _, options = heading.partition(" ")
    return verifier_config(name=name, **(yaml.safe_load(options) if options else {}))


def test_the_table_is_as_long_as_it_should_be():
    assert sum(len(rows) for rows in PAIRS.values()) >= 150
    assert {verdict for rows in PAIRS.values() for verdict, _, _ in rows} == {"right", "wrong"}


@pytest.mark.parametrize("heading", PAIRS)
def test_a_verifier_says_what_the_table_says(heading):
    config, rows = config_of(heading), PAIRS[heading]
    check_answers(config, [(answer, answer) for _, answer, _ in rows])
    scores = ask_all(config, [(answer, response) for _, answer, response in rows])
    said = {0.0: "wrong", 1.0: "right"}
    wrong = [(row, score) for row, score in zip(rows, scores, strict=True) if said[score.reward] != row[0]]
    assert wrong == []
