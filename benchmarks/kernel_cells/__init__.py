"""The parts of ``benchmarks/kernels.py``: cases, contenders, cells, and what is made of them."""
