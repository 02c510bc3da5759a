"""What all kernels compute in."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
