"""Cutting a graph into stages, one per device, so that the busiest device is least busy."""

from nearlinear.planning.partition.split import InfeasibleError, Partition, partition

__all__ = ["InfeasibleError", "Partition", "partition"]
