"""The knobs of the data plane: where samples wait between the rooms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, Positive
from tandem.config.section import Section

GIB = 2**30


class MemoryDataPlane(Section):
    """In the memory of the one process."""

    name: Literal["memory"] = "memory"
    max_bytes: Count = 16 * GIB  # of all rows together; a put past it ends the run


class RayActorDataPlane(Section):
    """In a Ray actor that every process of a run can reach; needs the extra `ray`."""

    name: Literal["ray_actor"]
    max_bytes: Count = 16 * GIB  # as above
    deadline_s: Positive = 60.0  # of one put, get or drop


class TransferQueueDataPlane(Section):
    """In the storage units of TransferQueue; needs the extras `transferqueue` and `ray`."""

    name: Literal["transfer_queue"]
    max_bytes: Count = 16 * GIB  # over all units
    deadline_s: Positive = 60.0  # of one put, get or drop
    num_storage_units: Count = 2  # processes, spread over the nodes


DataPlane = Annotated[MemoryDataPlane | RayActorDataPlane | TransferQueueDataPlane, Field(discriminator="name")]
