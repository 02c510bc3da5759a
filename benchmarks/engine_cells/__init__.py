"""What benchmarks/engine.py measures: a mixed load, decoding and prefill."""
