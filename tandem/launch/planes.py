"""Which implementation is the data plane of a run."""

from __future__ import annotations

from tandem.config.data_plane import DataPlane, MemoryDataPlane, RayActorDataPlane, TransferQueueDataPlane
from tandem.plane.memory import MemoryPlane
from tandem.roles import DataPlane as Plane


def build_plane(settings: DataPlane) -> Plane:
    """Start the plane that the recipe names. ValueError when its package is not installed."""
    match settings:
        case MemoryDataPlane():
            return MemoryPlane(max_bytes=settings.max_bytes)
        case RayActorDataPlane():
            from tandem.plane.ray_actor import RayActorPlane  # an extra: only where it is asked for

            return RayActorPlane(max_bytes=settings.max_bytes, deadline_s=settings.deadline_s)
        case TransferQueueDataPlane():
            from tandem.plane.transfer_queue import TransferQueuePlane  # as above

            return TransferQueuePlane(
                max_bytes=settings.max_bytes,
                deadline_s=settings.deadline_s,
                num_storage_units=settings.num_storage_units,
            )
