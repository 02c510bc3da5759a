"""Provider ``triton``: GPU kernels in Triton, compiled on first use.

Each module registers implementations that call the kernels of the ``jit`` module of the same name.
Triton is imported on the first call. With ``TRITON_INTERPRET=1``, Triton interprets the kernels on
CPU tensors, so that they can be tested without a GPU.

Reference: Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural
Network Computations", MAPL 2019.
"""

from opweave.kernels.triton import attention, linear, rows

__all__ = ["rows", "attention", "linear"]
