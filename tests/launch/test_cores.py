"""On a CPU one thread has the cores: trainers compute there, the rest of the process computes alone until it ends."""

import asyncio
import os
import subprocess
import sys

import torch

from tandem import cores
from tandem.launch.local import LocalMachinery
from tandem.launch.process import prepare
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


def test_passes_reuse_freed_memory_in_a_prepared_process():
    """Page faults of 20 rounds of large results: with glibc's defaults each is mapped anew."""
    code = """
import resource, torch
from concurrent.futures import ThreadPoolExecutor
from tandem.launch.process import keep_freed_memory
keep_freed_memory()
def round_():
    return [torch.ones(1 << 19) for _ in range(40)]
with ThreadPoolExecutor(1) as thread:
    for _ in range(3):
        thread.submit(round_).result()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        thread.submit(round_).result()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = 20 * 40 * (1 << 21) // 4096
    assert int(done.stdout) < pages // 10
