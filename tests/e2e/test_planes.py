"""A run learns the same bits whichever plane its samples wait in, and may go on in another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import run, short_config

pytestmark = pytest.mark.timeout(240)


def test_a_run_whose_samples_wait_in_a_ray_actor_ends_with_the_same_bits(tmp_path: Path, ray_here: None):
    here = run(short_config(), tmp_path / "memory")
    there = run(short_config("data_plane.name=ray_actor"), tmp_path / "ray_actor")
    assert there == here
    assert here.records[-1]["plane/bytes_put"] > 0
    assert here.records[-1]["plane/bytes_get"] > here.records[-1]["actor/bytes_read"] > 0


def test_a_run_in_transfer_queue_goes_on_in_memory_with_the_same_bits(tmp_path: Path, ray_here: None):
    pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (extra `transferqueue`)")
    whole = run(short_config(), tmp_path / "memory")
    queue = ("data_plane.name=transfer_queue", "data_plane.num_storage_units=1")
    first = run(short_config("ppo.max_num_steps=2", *queue), tmp_path / "moved")
    rest = run(short_config(), tmp_path / "moved", resume=True)
    assert first.records + rest.records == whole.records
    assert rest.weights == whole.weights
