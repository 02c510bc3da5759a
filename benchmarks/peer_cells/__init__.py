"""The engines that benchmarks/peers.py compares with: environments, models and measurements."""
