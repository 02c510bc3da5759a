"""The dtypes of all kernels."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
