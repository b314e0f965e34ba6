"""What a sample costs in each data plane: `python benchmarks/data_plane.py [--samples 1000] [--only memory ...]`.

Puts and gets samples of 2,048 tokens (tokens int64, mask bool, three float32 columns) in groups of 8, as rollouts and
trainers do, one call after the other; then one get of everything. Needs the extras ray and transferqueue.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import torch

from tandem.config.data_plane import DataPlane, MemoryDataPlane, RayActorDataPlane, TransferQueueDataPlane
from tandem.launch.planes import build_plane
from tandem.roles import DataPlane as Plane

GROUP, TOKENS = 8, 2048
FLOATS = ("gen_logprobs", "values", "advantages")
NAMES = ("tokens", "mask", *FLOATS)
Columns = dict[str, list[torch.Tensor]]


class Peer(Protocol):
    """What is measured: put and get of one group."""

    async def put(self, keys: Sequence[int], columns: Columns) -> object: ...

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> object: ...

    async def drop(self, keys: Sequence[int]) -> object: ...

    async def close(self) -> None: ...


class RayObjects:
    """The plain object store: one object a group, held by the driver; every column of it travels."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._refs: dict[int, object] = {}

    async def put(self, keys: Sequence[int], columns: Columns) -> None:
        arrays = {name: [row.numpy() for row in rows] for name, rows in columns.items()}
        self._refs[keys[0]] = self._ray.put(arrays)

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> Columns:
        groups = self._ray.get([self._refs[key] for key in keys[::GROUP]])
        return {name: [torch.tensor(row) for group in groups for row in group[name]] for name in names}

    async def drop(self, keys: Sequence[int]) -> None:
        self._refs.clear()

    async def close(self) -> None: ...


class RawTransferQueue:
    """TransferQueue as its own README uses it, on the units of one of our planes: no checks, no deadline."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._client = plane._client  # type: ignore[attr-defined]  # the benchmark may look inside

    async def put(self, keys: Sequence[int], columns: Columns) -> None:
        from tensordict import TensorDict

        fields = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
        data = TensorDict(fields, batch_size=[len(keys)])
        meta = await self._client.async_kv_retrieve_meta([str(key) for key in keys], "raw", create=True)
        await self._client.async_put(data, meta)

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> object:
        meta = await self._client.async_kv_retrieve_meta([str(key) for key in keys], "raw")
        return await self._client.async_get_data(meta.select_fields(list(names)))

    async def drop(self, keys: Sequence[int]) -> None:
        await self._client.async_clear_samples(
            await self._client.async_kv_retrieve_meta([str(key) for key in keys], "raw")
        )

    async def close(self) -> None:
        await self._plane.close()


def ours(settings: DataPlane) -> Callable[[], Peer]:
    return lambda: build_plane(settings)


QUEUE = TransferQueueDataPlane(name="transfer_queue", num_storage_units=2)
PEERS: dict[str, Callable[[], Peer]] = {
    "memory": ours(MemoryDataPlane()),
    "ray_actor": ours(RayActorDataPlane(name="ray_actor")),
    "transfer_queue": ours(QUEUE),
    "transfer_queue raw": lambda: RawTransferQueue(build_plane(QUEUE)),
    "ray object store": RayObjects,
}


def group_columns(seed: int) -> Columns:
    draw = torch.Generator().manual_seed(seed)
    columns: Columns = {
        "tokens": [torch.randint(150_000, (TOKENS,), generator=draw) for _ in range(GROUP)],
        "mask": [torch.arange(TOKENS) >= TOKENS // 4 for _ in range(GROUP)],
    }
    return columns | {name: [torch.randn(TOKENS, generator=draw) for _ in range(GROUP)] for name in FLOATS}


async def timed_ms(call: Awaitable[object]) -> float:
    start = time.perf_counter()
    await call
    return (time.perf_counter() - start) * 1e3


async def measure(peer: Peer, samples: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds: of each group's put, get of all columns and get of two, and of the get of everything."""
    times: dict[str, list[float]] = {"put": [], "get": [], "get 2": [], "all": []}
    groups = [range(first, first + GROUP) for first in range(0, samples, GROUP)]
    data = [group_columns(seed) for seed in range(len(groups))]
    for repeat in range(repeats + 1):  # the first one warms up
        found = {
            "put": [await timed_ms(peer.put(keys, columns)) for keys, columns in zip(groups, data, strict=True)],
            "get": [await timed_ms(peer.get(keys, NAMES)) for keys in groups],
            "get 2": [await timed_ms(peer.get(keys, ("tokens", "mask"))) for keys in groups],
            "all": [await timed_ms(peer.get(range(samples), NAMES))],
        }
        await peer.drop(range(samples))
        gc.collect()
        for name in times:
            times[name] += found[name] if repeat else []
    return times


def report(name: str, times: dict[str, list[float]], samples: int) -> str:
    megabytes = samples * TOKENS * (8 + 1 + 4 * len(FLOATS)) / 1e6
    put, get, two, everything = (statistics.median(times[key]) for key in ("put", "get", "get 2", "all"))
    groups = samples / GROUP
    row = [f"{put:.2f}", f"{get:.2f}", f"{two:.2f}", f"{everything:.0f}"]
    row += [f"{megabytes / (put * groups) * 1e3:.0f}", f"{megabytes / (get * groups) * 1e3:.0f}"]
    return f"| {name} | " + " | ".join(row) + " |"


async def session(name: str, samples: int, repeats: int) -> str:
    peer = PEERS[name]()
    try:
        return report(name, await measure(peer, samples, repeats), samples)
    finally:
        await peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    asked = parser.parse_args()
    if set(asked.only) - {"memory"}:
        from tandem.plane.ray_processes import start_ray

        start_ray(num_cpus=1, num_gpus=0)
    print(f"{asked.samples} samples x {TOKENS} tokens, groups of {GROUP}, {os.cpu_count()} CPUs; median ms a group")
    print("| plane | put | get | get tokens, mask | get of everything, ms | put MB/s | get MB/s |\n" + "|---" * 7 + "|")
    for name in asked.only:
        print(asyncio.run(session(name, asked.samples, asked.repeats)), flush=True)


if __name__ == "__main__":
    main()
