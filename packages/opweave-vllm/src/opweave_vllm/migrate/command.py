"""``opweave migrate``: rewrite a module of vLLM-style custom ops for opweave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from opweave.cli.options import Flag
from opweave.cli.output import CliError, err, print_json, write

if TYPE_CHECKING:
    from opweave_vllm.migrate.plan import LayerPlan


def migrate(
    file: Path,
    /,
    *,
    output: Annotated[str, Parameter(name=("--output", "-o"))] = "-",
    json: Flag = False,
) -> int:
    """Rewrite a module of CustomOp classes as ops, implementations and layers.

    Prints the new module, with the comments and the formatting of the old one; the report goes to
    standard error. The module is parsed, never imported. A class with the name of one of opweave's
    layers is replaced if both compute the same on drawn inputs. Exits with 1 if one is kept.

    Parameters
    ----------
    file
        A Python file with classes that derive from CustomOp, PluggableLayer or MultiPlatformOp.
    json
        Print JSON.
    """
    try:
        from opweave_vllm.migrate.codemod import migrated
    except ModuleNotFoundError as error:
        raise CliError(
            f"opweave migrate needs a package that is not installed ({error}). Install it with: "
            "pip install 'opweave-vllm[migrate]'"
        ) from error
    from opweave_vllm.migrate.plan import plan
    from opweave_vllm.migrate.source import read
    from opweave_vllm.migrate.trees import remaining_imports

    source = read(file)
    plans = plan(source)
    try:
        text = migrated(source, plans)
    except RecursionError as error:
        raise CliError(f"{str(file)!r} is nested too deeply to be rewritten.") from error
    left = remaining_imports(text)
    kept = [p.layer.name for p in plans if p.is_unregistered and p.layer.kind == "CustomOp"]
    if json:
        print_json(
            {
                "file": str(file),
                "classes": [_describe(layer_plan) for layer_plan in plans],
                "notes": source.notes,
                "kept": kept,
                "imports_left": left,
                "sketch": text,
            }
        )
        return 1 if kept else 0
    for layer_plan in plans:
        described = _describe(layer_plan)
        err.print(f"{described['class']}, line {described['line']}", markup=False)
        for item in described["becomes"]:
            err.print(f"  {item['what']}: {item['name']} ({item['why']})", markup=False)
        for note in described["notes"]:
            err.print(f"  note: {note}", markup=False)
    for note in source.notes:
        err.print(f"note: {note}", markup=False)
    write("--output", output, text)
    converted = sum(each.is_converted for each in plans)
    imports = f"; still imports {', '.join(left)}" if left else ""
    others = f"; not the same as opweave's layers: {', '.join(kept)}" if kept else ""
    err.print(f"{converted} of {len(plans)} classes converted{others}{imports}", markup=False)
    return 1 if kept else 0


def _describe(plan: LayerPlan) -> dict[str, Any]:
    layer, op = plan.layer, plan.op
    becomes = []
    if op is not None:
        if op.native is not None:
            becomes.append(("op", op.name, "forward_native, with its attributes as arguments"))
        for impl in plan.impls:
            why = f"{impl.method}, an implementation of {op.name}"
            becomes.append(("register_impl", impl.provider, why))
    if plan.stays:
        name = layer.registered or layer.replaces or layer.name
        why = "its methods call the op" if plan.calls_op else "as it is"
        becomes.append(("replacement" if layer.replaces else "layer", name, why))
    return {
        "class": layer.name,
        "line": layer.node.lineno,
        "kind": layer.kind,
        "registered": layer.registered,
        "replaces": layer.replaces,
        "becomes": [{"what": kind, "name": name, "why": why} for kind, name, why in becomes],
        "notes": plan.notes,
    }
