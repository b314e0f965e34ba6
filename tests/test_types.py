"""The nouns: metrics merge exactly, batches keep their order."""

import pytest

from tandem.types import Batch, Group, Max, Mean, Min, Sample, Score, Sum, merge


def test_merged_means_are_the_mean_of_the_whole():
    parts = [{"x": Mean(2.0, 1)}, {"x": Mean(10.0, 4)}, {"y": Sum(1.0)}]
    merged = merge(*parts)
    assert merged["x"].value == pytest.approx(12.0 / 5)
    assert merged["y"].value == 1.0


def test_max_min_and_sum_merge():
    merged = merge({"a": Max(1.0), "b": Min(1.0), "c": Sum(1.0)}, {"a": Max(3.0), "b": Min(-1.0), "c": Sum(2.5)})
    assert [merged[k].value for k in "abc"] == [3.0, -1.0, 3.5]


def test_one_name_of_two_kinds_is_refused():
    with pytest.raises(TypeError, match="'x'"):
        merge({"x": Sum(1.0)}, {"x": Max(1.0)})


def test_a_batch_labels_samples_with_their_group():
    def group(index: int) -> Group:
        return Group(
            index, f"p{index}", (2 * index, 2 * index + 1), (5, 6), (2, 3), (0.0, 1.0), (False, False), {}, 0, 0
        )

    batch = Batch.of([group(3), group(1)])
    assert batch.keys == (6, 7, 2, 3)
    assert batch.groups == (3, 3, 1, 1)
    assert batch.pick([2, 0]) == Batch((2, 6), (5, 5), (1, 3))


def test_a_sample_of_uneven_columns_is_refused():
    with pytest.raises(ValueError, match="one length"):
        Sample((1, 2), (False,), (0.0, 0.0), (0, 0), Score(1.0), False, "")
