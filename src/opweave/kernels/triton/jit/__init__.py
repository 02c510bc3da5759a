"""The kernels themselves: what Triton compiles. Importing one of these modules imports Triton."""
