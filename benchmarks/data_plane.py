"""What 1,000 samples cost in each data plane: `python benchmarks/data_plane.py [--only memory ...]`.

Puts samples of 2,048 tokens (tokens int64, mask bool, three float32 columns) in whole groups of 8, one call after the
other, and gets them the same way, then in one call. Medians over the repeats. Needs the extras ray and transferqueue.
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
    "Ray actor": ours(RayActorDataPlane(name="ray_actor")),
    "TransferQueue raw": lambda: RawTransferQueue(build_plane(QUEUE)),
    "TransferQueue ours": ours(QUEUE),
    "Ray object store": RayObjects,
}


def group_columns(seed: int, size: int) -> Columns:
    draw = torch.Generator().manual_seed(seed)
    columns: Columns = {
        "tokens": [torch.randint(150_000, (TOKENS,), generator=draw) for _ in range(size)],
        "mask": [torch.arange(TOKENS) >= TOKENS // 4 for _ in range(size)],
    }
    return columns | {name: [torch.randn(TOKENS, generator=draw) for _ in range(size)] for name in FLOATS}


async def timed_ms(call: Awaitable[object]) -> float:
    start = time.perf_counter()
    await call
    return (time.perf_counter() - start) * 1e3


async def measure(peer: Peer, samples: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds for all samples, one number a repeat: what put and get take by groups, and get in one call."""
    times: dict[str, list[float]] = {"put": [], "get": [], "get 2": [], "get at once": []}
    groups = [range(first, min(first + GROUP, samples)) for first in range(0, samples, GROUP)]
    data = [group_columns(seed, len(keys)) for seed, keys in enumerate(groups)]
    for repeat in range(repeats + 1):  # the first one warms up
        found = {
            "put": sum([await timed_ms(peer.put(keys, columns)) for keys, columns in zip(groups, data, strict=True)]),
            "get": sum([await timed_ms(peer.get(keys, NAMES)) for keys in groups]),
            "get 2": sum([await timed_ms(peer.get(keys, ("tokens", "mask"))) for keys in groups]),
            "get at once": await timed_ms(peer.get(range(samples), NAMES)),
        }
        await peer.drop(range(samples))
        gc.collect()
        for name in times:
            times[name] += [found[name]] if repeat else []
    return times


def report(name: str, times: dict[str, list[float]], samples: int) -> str:
    megabytes = samples * TOKENS * (8 + 1 + 4 * len(FLOATS)) / 1e6
    put, get, two, at_once = (statistics.median(times[key]) for key in ("put", "get", "get 2", "get at once"))
    row = [f"{put:.1f}", f"{get:.1f}", f"{two:.1f}", f"{at_once:.1f}"]
    row += [f"{megabytes / put * 1e3:.0f}", f"{megabytes / get * 1e3:.0f}"]
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
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{asked.samples} samples x {TOKENS} tokens in groups of {GROUP}, {machine}; median ms")
    print("| plane | put | get | get tokens, mask | get in one call | put MB/s | get MB/s |\n" + "|---" * 7 + "|")
    for name in asked.only:
        print(asyncio.run(session(name, asked.samples, asked.repeats)), flush=True)


if __name__ == "__main__":
    main()
