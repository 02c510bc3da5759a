"""Run a kernel of your own for one of opweave's ops: python examples/hello_kernel.py."""

import torch

from opweave import ir


@ir.ops.silu_and_mul.register_impl("hello", supports_args=ir.rules.last_dim_multiple_of("x", 2))
def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.sigmoid(gate) * gate * up


with torch.no_grad(), ir.priority(silu_and_mul=["hello"]):
    print(ir.explain(ir.ops.silu_and_mul, torch.randn(2, 8)))
