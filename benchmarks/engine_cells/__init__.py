"""The workloads of benchmarks/engine.py: a mixed load, decode and prefill."""
