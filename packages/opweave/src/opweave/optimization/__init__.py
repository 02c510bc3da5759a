"""Run the modules of any PyTorch model on opweave's kernels, without changing the model's code.

    import opweave

    report = opweave.optimize(model)
    print(report)            # which modules were replaced, and why others were not
    opweave.restore(model)   # the model as it was

Linear layers, normalization layers and gated MLPs are recognized by their structure, in any
:class:`torch.nn.Module`; transformers models also get opweave's attention. Before a module is
replaced, its old and its new ``forward`` run on random inputs. If they differ, it is not replaced.
"""

from opweave.optimization.replacement import ModuleOutcome, OptimizeReport, optimize, restore

__all__ = ["OptimizeReport", "ModuleOutcome", "optimize", "restore"]
