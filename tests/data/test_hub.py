"""Data sets through the library `datasets`: folders of this machine, and what is said where there is no network."""

import json

import pytest

from tandem.config.data import Gsm8kData, HubData
from tandem.data.rows import Row
from tandem.data.sources import rows_of

datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
RECORDS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}", "info": {"index": n}} for n in range(1500)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    """A folder as one downloads it: files whose names begin with their split."""
    place = tmp_path / "set"
    place.mkdir()
    for split, records in {"train": RECORDS, "test": RECORDS[:3]}.items():
        (place / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return place


def hub(dataset, **settings):
    return HubData(name="hub", dataset=str(dataset), **settings)


def test_a_folder_is_read_by_its_splits(folder):
    rows = rows_of(hub(folder), 0)
    assert len(rows) == 1500
    assert rows[1400] == Row("train:1401", "1400 + 1?", "#### 1401")
    assert len(rows_of(hub(folder, split="test", id_field="info.index"), 0)) == 3
    assert rows_of(hub(folder, id_field="info.index"), 0)[7].id == "7"


def test_only_the_fields_that_are_wanted_are_read_but_a_missing_one_names_all(folder):
    with pytest.raises(ValueError, match=r"row 1: has no field 'problem'; its fields: 'question', 'answer', 'info'"):
        rows_of(hub(folder, prompt_field="problem"), 0)


def test_what_the_library_saved_is_read(tmp_path):
    saved = datasets.Dataset.from_list(RECORDS[:5])
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "several")
    assert len(rows_of(hub(tmp_path / "one"), 0)) == 5
    assert len(rows_of(hub(tmp_path / "several", split="test"), 0)) == 5
    with pytest.raises(ValueError, match=r"split train\) could not be loaded .* check its name, subset and split"):
        rows_of(hub(tmp_path / "several"), 0)
    datasets.Dataset.from_list(RECORDS[:5], split="test").save_to_disk(tmp_path / "test")
    with pytest.raises(ValueError, match=r"split train\) could not be loaded \(it holds the split test\)"):
        rows_of(hub(tmp_path / "test"), 0)
    with pytest.raises(ValueError, match="`subset` has no effect"):
        rows_of(hub(tmp_path / "one", subset="main"), 0)


def test_without_a_network_the_message_says_what_to_do(folder):
    # The tests run with HF_HUB_OFFLINE=1: the library refuses at once what it would have to fetch.
    with pytest.raises(ValueError, match="openai/gsm8k") as error:
        rows_of(Gsm8kData(name="gsm8k"), 0, key="data.train")
    assert "could not be loaded" in str(error.value)
    assert "without a network, download its rows and set data.train.path=FILE" in str(error.value)
    with pytest.raises(ValueError, match=r"set data\.validation\.name=file and data\.validation\.path=FILE"):
        rows_of(hub("someone/something"), 0, key="data.validation")
    with pytest.raises(ValueError, match="no such folder"):
        rows_of(hub("./nowhere"), 0)
    with pytest.raises(ValueError, match="Unknown split"):
        rows_of(hub(folder, split="tset"), 0)
