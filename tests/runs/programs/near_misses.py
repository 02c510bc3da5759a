"""Near misses: the graph of a spelling or composite with one change, before and after the passes.

The passes of the joint stage up to fusion run on the graph itself, without Dynamo and Inductor.
Both graphs then run with the native implementations, so only spellings may differ, by rounding.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from opweave import ir
from opweave.compile.compat import fake_mode_of
from opweave.compile.fuse import fuse
from opweave.compile.graph import GraphInfo, computed_fake, fake_of, tensors_of
from opweave.compile.match import Pattern, derivation
from opweave.compile.options import CompileOptions
from opweave.compile.passes import eliminate_noops
from opweave.compile.plan import Context, Plan
from opweave.compile.recognize import DTYPES, recognize

MARGIN = 8.0  # roundings by which a spelling may differ from its op
TRIES = 50  # changes drawn until a program runs


@dataclass(frozen=True)
class Difference:
    """A near miss that the passes change to another computation."""

    seed: int
    op: str
    change: str
    difference: str
    sources: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "torch": ""}


def originals() -> list[Pattern]:
    """Return the patterns of all spellings and composites that run in one process.

    Each op gets a kernel that computes the same as native, so that all patterns are replaced.
    """
    registry = ir.current_registry()
    registry.ensure_ready()
    patterns: list[Pattern] = []
    for op in list(registry.ops.values()):
        if not (op.composite or op.spellings):
            continue
        op.register_impl("near_misses")(op.native)
        op.set_default(["near_misses"])
        if op.composite:
            patterns += derivation(op).patterns
        for spelling in op.spellings:
            for dtype in DTYPES:
                patterns += derivation(op, spelling, dtype=dtype).patterns
    return [p for p in patterns if not any("c10d" in str(n.target) for n in p.info.ops)]


def examine_near_miss(
    seed: int, patterns: list[Pattern], plan: Plan
) -> tuple[Context, Difference | None]:
    """Draw near miss number *seed*, run the passes on it, and compare it with eager mode."""
    rng = random.Random(seed)
    pattern = patterns[seed % len(patterns)]
    inputs = [pattern.values[position] for position in pattern.parameters]
    change, before = _draw(rng, pattern, inputs)
    after = _copy(before.graph)
    context = Context(plan)
    try:
        _change(after, context)
        reason = _difference(_run(before, inputs), _run(after, inputs))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if not reason:
        return context, None
    return context, Difference(
        seed, pattern.op.name, change, reason, (before.code.strip(), after.code.strip())
    )


def _change(module: GraphModule, context: Context) -> None:
    """Run the passes, in the order of the pipeline."""
    info = GraphInfo(module.graph)
    for run in (recognize, eliminate_noops, fuse):
        run(info, context)
        info = info.current()
    module.graph.lint()
    module.recompile()


def plan_for_near_misses() -> Plan:
    """Return the plan that the passes follow: all options but code generation."""
    return Plan.capture([ir.current_registry()], CompileOptions(codegen=False))


def _draw(rng: random.Random, pattern: Pattern, inputs: list[Tensor]) -> tuple[str, GraphModule]:
    """Return a graph with one change that runs, and the name of the change."""
    for _ in range(TRIES):
        module = _copy(pattern.info.graph)
        change = rng.choice(CHANGES)
        if not change(rng, module.graph):
            continue
        module.graph.eliminate_dead_code()
        module.recompile()
        try:
            _run(module, inputs)  # before the fake values, for which torch logs each failure
            _renew_fakes(module.graph)
        except Exception:  # the change does not fit: shapes or dtypes differ, or a part is missing
            continue
        return change.__name__.strip("_"), module
    return "nothing", _copy(pattern.info.graph)


def _copy(graph: Graph) -> GraphModule:
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return GraphModule({}, new)


def _renew_fakes(graph: Graph) -> None:
    mode = fake_mode_of([t for node in graph.nodes for t in tensors_of(node)])
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = computed_fake(node, mode)


def _run(module: GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), ir.priority(dict.fromkeys(ir.current_registry().ops, "native")):
        values = Interpreter(module).run(*(tensor.clone() for tensor in inputs))
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _difference(expected: list[Tensor], values: list[Tensor]) -> str:
    """Return how *values* differ, or an empty string; only 16 and 32 bit floats may differ."""
    for number, (right, value) in enumerate(zip(expected, values, strict=True)):
        if (value.shape, value.dtype) != (right.shape, right.dtype):
            return (
                f"value {number}: {value.dtype}{[*value.shape]}, not {right.dtype}{[*right.shape]}"
            )
        exact, other = right.double(), value.double()
        finite = exact.isfinite() & other.isfinite()
        if not torch.equal(exact[~finite].nan_to_num(), other[~finite].nan_to_num()):
            return f"value {number}: other elements are not finite"
        off = (exact - other)[finite].abs()
        eps = torch.finfo(right.dtype).eps if right.dtype in DTYPES else 0.0
        allowed = MARGIN * eps * exact[finite].abs().max().item() if off.numel() else 0.0
        if (off > allowed).any():
            return f"value {number} differs by up to {off.max():.3g}; {allowed:.3g} is allowed"
    return ""


# Changes; each returns whether the graph has a place for it.


def _places(graph: Graph, fits: Callable[[Any], bool]) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Yield (node, path) for the arguments that fit, also inside lists."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for place, value in enumerate(node.args):
            if fits(value):
                yield node, (place,)
            if isinstance(value, (list, tuple)):
                yield from ((node, (place, i)) for i, item in enumerate(value) if fits(item))


def _at(node: Node, path: tuple[int, ...]) -> Any:
    value: Any = node.args
    for step in path:
        value = value[step]
    return value


def _put(node: Node, path: tuple[int, ...], value: Any) -> None:
    args: list[Any] = list(node.args)
    if len(path) == 2:
        items = list(args[path[0]])
        items[path[1]] = value
        value = items
    args[path[0]] = value
    node.args = tuple(args)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(fake_of(value), Tensor)


def _edge(rng: random.Random, graph: Graph) -> bool:
    """One operand is another value of the same shape and dtype, or of any."""
    places = list(_places(graph, _is_tensor))
    if not places:
        return False
    node, path = rng.choice(places)
    old = _at(node, path)
    earlier = []
    for other in graph.nodes:
        if other is node:
            break
        if _is_tensor(other) and other is not old:
            earlier.append(other)
    alike = [n for n in earlier if fake_of(n).shape == fake_of(old).shape]
    choices = alike or earlier
    if not choices:
        return False
    _put(node, path, rng.choice(choices))
    return True


def _part(rng: random.Random, graph: Graph) -> bool:
    """One reader reads another part of a tuple."""
    items = [node for node in graph.nodes if node.target is operator.getitem]
    if not items:
        return False
    item = rng.choice(items)
    count = len(fake_of(item.args[0]))
    with graph.inserting_after(item):
        other = graph.call_function(operator.getitem, (item.args[0], rng.randrange(count)))
    reader = rng.choice(list(item.users)) if item.users else item
    reader.replace_input_with(item, other)
    return True


def _order(rng: random.Random, graph: Graph) -> bool:
    """Two operands of one operator are swapped."""
    places = list(_places(graph, _is_tensor))
    pairs = [(a, b) for a in places for b in places if a[0] is b[0] and a[1] < b[1]]
    if not pairs:
        return False
    (node, first), (_, second) = rng.choice(pairs)
    one, other = _at(node, first), _at(node, second)
    _put(node, first, other)
    _put(node, second, one)
    return True


def _constant(rng: random.Random, graph: Graph) -> bool:
    """One number, flag or dimension is another; a dimension may be the same, counted from 0."""
    places = [
        place
        for place in _places(graph, lambda value: isinstance(value, (int, float)))
        if place[0].target is not operator.getitem
    ]
    if not places:
        return False
    node, path = rng.choice(places)
    old = _at(node, path)
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, float):
        new = rng.choice((-old, old + 0.5, 3 * old))
    else:
        rank = next((fake_of(n).ndim for n in node.all_input_nodes if _is_tensor(n)), 2)
        new = rng.choice((old + 1, old - 1, -old, old + rank, old - rank, float(old)))
    _put(node, path, new)
    return True


def _dtype(rng: random.Random, graph: Graph) -> bool:
    """One operand is rounded to another dtype and back, or stays in that dtype."""
    places = [
        (node, path)
        for node, path in _places(graph, _is_tensor)
        if fake_of(_at(node, path)).is_floating_point()
    ]
    if not places:
        return False
    node, path = rng.choice(places)
    value = _at(node, path)
    convert = torch.ops.prims.convert_element_type.default
    dtype = fake_of(value).dtype
    with graph.inserting_before(node):
        new = graph.call_function(convert, (value, rng.choice([d for d in DTYPES if d != dtype])))
        if rng.random() < 0.7:
            new = graph.call_function(convert, (new, dtype))
    _put(node, path, new)
    return True


def _user(rng: random.Random, graph: Graph) -> bool:
    """One more value is returned: an intermediate result, or a function of it."""
    output = next(iter(graph.find_nodes(op="output")))
    values = [n for n in graph.nodes if n.op == "call_function" and _is_tensor(n)]
    if not values:
        return False
    value = rng.choice(values)
    if rng.random() < 0.5:
        with graph.inserting_before(output):
            value = graph.call_function(torch.ops.aten.neg.default, (value,))
    results = output.args[0]
    output.args = ((*results, value) if isinstance(results, (list, tuple)) else (results, value),)
    return True


def _input(rng: random.Random, graph: Graph) -> bool:
    """One input is also passed for another one."""
    inputs = graph.find_nodes(op="placeholder")
    pairs = [
        (a, b)
        for a in inputs
        for b in inputs
        if a is not b and fake_of(a).shape == fake_of(b).shape
    ]
    if not pairs:
        return False
    first, second = rng.choice(pairs)
    first.replace_all_uses_with(second)
    return True


CHANGES = (_edge, _edge, _part, _part, _order, _constant, _constant, _dtype, _user, _input)
