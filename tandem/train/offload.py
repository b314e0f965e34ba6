"""A device's memory given back while others compute: the bytes wait on the host, pinned where copies gain by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """What has left its device. Its tensors stay the same objects, without bytes until they return.

    Storages move, not tensors: all views of one stay true (FSDP's own, the parts that an optimizer steps).
    """

    def __init__(self) -> None:
        self._bytes: dict[torch.UntypedStorage, torch.UntypedStorage] = {}

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy these to the host and free them on their device. What is here already stays."""
        found = dict.fromkeys(tensor.untyped_storage() for tensor in tensors)
        leaving = [storage for storage in found if storage not in self._bytes and storage.nbytes()]
        for storage in leaving:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda).untyped_storage()
            self._bytes[storage] = host.copy_(storage, non_blocking=True)
        finish_copies(leaving)
        for storage in leaving:
            storage.resize_(0)
        if any(storage.is_cuda for storage in leaving):
            torch.cuda.empty_cache()  # the next to compute may be another process

    def give_back(self) -> None:
        """All of them, to where they were."""
        for storage, host in self._bytes.items():
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        finish_copies(self._bytes)
        self._bytes.clear()

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor's numbers, wherever they are."""
        host = self._bytes.get(tensor.untyped_storage())
        if host is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def finish_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait until the device has made its copies."""
    for device in {storage.device for storage in storages if storage.is_cuda}:
        torch.cuda.synchronize(device)
