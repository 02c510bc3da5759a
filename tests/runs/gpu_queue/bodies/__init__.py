"""The bodies of the jobs. Each also runs on the CPU, at a small size, so that it can be tested."""
