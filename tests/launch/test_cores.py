"""On a CPU one thread has the cores: trainers compute there, the rest of the process computes alone until it ends."""

import asyncio
import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tandem import cores
from tandem.launch.local import LocalMachinery
from tandem.launch.process import prepare, threads_of
from tests.e2e.runs import short_config


def test_a_thread_has_the_cores_that_were_given_whatever_others_take():
    before = torch.get_num_threads()
    cores.give(2)
    thread = cores.thread_with_all("trainers")
    try:
        torch.set_num_threads(1)
        assert thread.submit(torch.get_num_threads).result() == 2
        thread.submit(torch.zeros(1 << 20).add_, 1).result()
        assert thread.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 1
    finally:
        thread.shutdown()
        cores.give(before)
        torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "threads"), [((), 1), (("cluster.num_threads=3",), 3)])
def test_a_process_with_a_gpu_computes_on_one_core_unless_the_recipe_says(asked: tuple[str, ...], threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert threads_of(short_config("cluster.device=cuda", *asked).cluster) == threads
    assert threads_of(short_config("cluster.device=cpu").cluster) == 2
    torch.set_num_threads(before)


def test_machinery_gives_the_cores_to_its_trainers_and_takes_them_back():
    before = torch.get_num_threads()
    config = short_config("cluster.num_threads=2")
    prepare(config.cluster)

    async def scene() -> tuple[int, int, list[int]]:
        machinery = LocalMachinery(config)
        plane = await machinery.start_plane()
        await machinery.start_engine(pad_token_id=0)
        trainers = await machinery.start_trainers(plane)
        inside = [await machinery.workers[name]._run(torch.get_num_threads) for name in trainers]
        here = torch.get_num_threads()
        await machinery.close()
        return here, torch.get_num_threads(), inside

    here, after, inside = asyncio.run(scene())
    cores.give(before)
    torch.set_num_threads(before)
    assert here == 1
    assert inside == [2] * len(inside)
    assert after == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_passes_reuse_freed_memory_in_a_prepared_process():
    """Page faults of 20 rounds of results of several sizes: with glibc's defaults most pages are mapped anew."""
    code = """
import resource, torch
from tandem.launch.process import keep_freed_memory
keep_freed_memory()
def rounds(number):
    for _ in range(number):
        kept = []
        for i in range(60):
            kept.append(torch.ones(1664 * (128 + i % 7 * 64)))
            if i % 3 == 0:
                kept.pop(0)
rounds(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rounds(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # 600 here, 360,000 without
