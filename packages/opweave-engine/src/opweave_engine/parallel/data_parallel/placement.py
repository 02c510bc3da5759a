"""Placement: divides the resources of a cluster between replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opweave_engine.errors import InvalidArgumentError

CPU = "CPU"
_RESOURCES = {"cuda": "GPU", "xpu": "GPU"}


def resource_name(device_type: str) -> str:
    """Return Ray's resource name for torch's *device_type*, such as ``GPU`` for ``cuda``."""
    return _RESOURCES.get(device_type, device_type.upper())


def replica_resources(
    nodes: Sequence[Mapping[str, float]], replicas: int, devices: Mapping[str, int]
) -> dict[str, int]:
    """Return the resources of each replica: its devices, and the most CPUs that all can have.

    Args:
        nodes: the resources of each machine.
        replicas: the number of replicas; each runs on a single machine.
        devices: the devices that each replica needs, in addition to at least one CPU.

    Raises:
        InvalidArgumentError: the machines have too few resources.
    """
    need = {name: count for name, count in devices.items() if name != CPU}
    least = max(1, devices.get(CPU, 1))
    most = max((int(node.get(CPU, 0)) for node in nodes), default=0)
    for processors in range(most, least - 1, -1):
        room = {**need, CPU: processors}
        if sum(_count(node, room) for node in nodes) >= replicas:
            return room
    wanted = ", ".join(f"{count} {name}" for name, count in {**need, CPU: least}.items())
    found = "; ".join(
        ", ".join(f"{node.get(name, 0):g} {name}" for name in {**need, CPU: least})
        for node in nodes
    )
    raise InvalidArgumentError(
        f"data_parallel_size={replicas}: each replica needs {wanted} on one machine, but Ray's "
        f"machines have: {found or 'nothing'}. Lower data_parallel_size or tensor_parallel_size, "
        "or add machines to the cluster."
    )


def _count(node: Mapping[str, float], room: Mapping[str, int]) -> int:
    return min(int(node.get(name, 0) // count) for name, count in room.items())
