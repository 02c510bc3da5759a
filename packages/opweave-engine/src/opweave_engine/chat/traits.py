"""How a chat template reads messages, found in its syntax tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import meta, nodes

# Queries over the syntax tree of a Jinja template.


_SAME_VALUE = {"d", "default", "list", "rejectattr", "reverse", "selectattr"}


@dataclass(frozen=True)
class Placed:
    """A node, and the nodes around it, the innermost first."""

    node: Any
    above: tuple[Any, ...]


class Syntax:
    """The syntax tree of one template."""

    def __init__(self, tree: Any) -> None:
        self.placed = list(self.below(tree))

    @staticmethod
    def below(root: Any) -> Iterator[Placed]:
        """Yield *root* and every node in it."""
        # Not recursive: an expression can nest more deeply than Python's stack.
        waiting = [Placed(root, ())]
        while waiting:
            placed = waiting.pop()
            yield placed
            above = (placed.node, *placed.above)
            waiting += [Placed(child, above) for child in placed.node.iter_child_nodes()]

    @cached_property
    def bindings(self) -> list[tuple[str, Any]]:
        """Every name and a value that it may have: of assignments, and of a macro's parameters."""
        pairs: list[tuple[Any, Any]] = []
        macros = {p.node.name: p.node for p in self.placed if isinstance(p.node, nodes.Macro)}
        for node in (placed.node for placed in self.placed):
            if isinstance(node, nodes.Assign):
                pairs.append((node.target, node.node))
            elif isinstance(node, nodes.With):
                pairs += zip(node.targets, node.values, strict=True)
            elif isinstance(node, nodes.Call) and (
                macro := macros.get(getattr(node.node, "name", ""))
            ):
                by_name = {parameter.name: parameter for parameter in macro.args}
                pairs += zip(macro.args, node.args, strict=False)
                pairs += [(by_name.get(keyword.key), keyword.value) for keyword in node.kwargs]
        return [(target.name, value) for target, value in pairs if isinstance(target, nodes.Name)]


class Field:
    """Where a template reads one field of its messages, directly or through variables.

    Args:
        name: the name of the field.
        syntax: the syntax tree of the template.
    """

    def __init__(self, name: str, syntax: Syntax) -> None:
        self._name, self._variables = name, set[str]()
        while True:
            names = {name for name, value in syntax.bindings if self.is_value(value)}
            if names <= self._variables:
                return
            self._variables |= names

    def is_read(self, node: Any) -> bool:
        """Return whether *node* reads the field: ``m.name``, ``m['name']``, or ``m.get('name')``.

        A variable that holds the field counts, too.
        """
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == self._name)
        if isinstance(node, nodes.Getitem):
            return self._is_name(node.arg)
        if isinstance(node, nodes.Call):
            is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
            return is_get and bool(node.args) and self._is_name(node.args[0])
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in self._variables

    def is_value(self, node: Any) -> bool:
        """Return whether the value of *node* is the field, or a list of items of it."""
        if isinstance(node, nodes.Filter):
            return node.name in _SAME_VALUE and self.is_value(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self.is_value(node.node)
        if isinstance(node, nodes.CondExpr):
            return any(self.is_value(value) for value in (node.expr1, node.expr2) if value)
        if isinstance(node, nodes.Or):
            return self.is_value(node.left) or self.is_value(node.right)
        return self.is_read(node)

    def _is_name(self, node: Any) -> bool:
        return isinstance(node, nodes.Const) and bool(node.value == self._name)


# The traits of a template.


# Filters that take a list of content parts, as a template applies them to content.
_FILTERS_OF_PARTS = {"selectattr", "rejectattr", "map", "groupby"}
_FILTERS_OF_TEXT = {
    "e", "escape", "from_json", "fromjson", "indent", "lower", "replace", "safe", "string", "trim",
    "upper",
}  # fmt: skip
_TRANSPARENT_FILTERS = {"default", "d"}


@dataclass(frozen=True)
class Traits:
    """The message format that a template expects.

    Attributes:
        source: the template.
        tree: its syntax tree.
    """

    source: str
    tree: Any

    def mentions(self, name: str) -> bool:
        """Whether *name* occurs anywhere in the template."""
        return name in self.source

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads the parts of a message whose content is a list."""
        return bool(self._uses_of_parts)

    @cached_property
    def needs_parts(self) -> bool:
        """Whether it reads parts without testing first whether the content is a string."""
        return not all(map(self._is_guarded, self._uses_of_parts))

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        """Whether it prints the arguments of a call unchanged, and never as an object."""
        kinds = set(filter(None, map(self._use_of_arguments, self._syntax.placed)))
        return kinds == {"text"}

    @cached_property
    def needs_null_content(self) -> bool:
        """Whether it prints the calls of a message only if its content is None."""
        return any(
            any(map(self._tests_for_none, self._syntax.below(node.test)))
            and any(self._mentions("tool_calls", part) for part in (node.test, *node.body))
            for node in (placed.node for placed in self._syntax.placed)
            if isinstance(node, nodes.If)
        )

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself."""
        environment = self.tree.environment
        # A separate tree, because Jinja folds the constants in the tree that it searches.
        tree = environment.parse(self.source)
        return frozenset(meta.find_undeclared_variables(tree) - environment.globals.keys())

    @cached_property
    def strings(self) -> frozenset[str]:
        """All string constants, which include the roles that the template distinguishes."""
        constants = (p.node.value for p in self._syntax.placed if isinstance(p.node, nodes.Const))
        return frozenset(value for value in constants if isinstance(value, str))

    @cached_property
    def _syntax(self) -> Syntax:
        return Syntax(self.tree)

    @cached_property
    def _content(self) -> Field:
        return Field("content", self._syntax)

    @cached_property
    def _arguments(self) -> Field:
        return Field("arguments", self._syntax)

    @cached_property
    def _uses_of_parts(self) -> list[Placed]:
        return [placed for placed in self._syntax.placed if self._uses_parts(placed.node)]

    def _uses_parts(self, node: Any) -> bool:
        content = self._content
        # A loop that looks for images alone takes a string, too: its characters are not images.
        if isinstance(node, nodes.For):
            return content.is_value(node.iter) and self._mentions("text", node)
        if isinstance(node, nodes.Filter):
            takes_parts = node.name in _FILTERS_OF_PARTS and content.is_value(node.node)
            return takes_parts and self._mentions("text", node)
        if not isinstance(node, nodes.Getattr | nodes.Getitem):
            return False
        # The text of the first part: content[0].text, content[0]['text'], (content | first).text
        name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        item: Any = node.node
        if isinstance(item, nodes.Filter):
            is_item = item.name in ("first", "last")
        else:
            is_item = isinstance(item, nodes.Getitem) and not isinstance(item.arg, nodes.Slice)
        is_of_parts = isinstance(name, str) and name != "type" and not hasattr(str, name)
        return is_of_parts and is_item and content.is_value(item.node)

    def _is_guarded(self, use: Placed) -> bool:
        """Return whether *use* depends on a test for strings."""
        return any(
            self._tests_for_string(placed.node)
            for inner, above in zip((use.node, *use.above), use.above, strict=False)
            for condition in self._conditions(inner, above)
            for placed in self._syntax.below(condition)
        )

    def _conditions(self, inner: Any, above: Any) -> list[Any]:
        """Return what *above* tests before it comes to *inner*, which is a child of it."""
        if isinstance(above, nodes.And | nodes.Or):
            return [above]
        if isinstance(above, nodes.CondExpr):
            return [above.test]
        if not isinstance(above, nodes.If):
            return []
        branches = [above, *above.elif_]
        tests = [branch.test for branch in branches]
        if any(inner is node for node in above.else_):
            return tests
        count = next((i for i, branch in enumerate(branches) if branch is inner), 1)
        return tests[:count]

    def _tests_for_string(self, node: Any) -> bool:
        is_test = isinstance(node, nodes.Test) and node.name == "string"
        return is_test and self._content.is_value(node.node)

    def _tests_for_none(self, placed: Placed) -> bool:
        node = placed.node
        if placed.above and isinstance(placed.above[0], nodes.Not):
            return False
        if isinstance(node, nodes.Compare) and [operand.op for operand in node.ops] == ["eq"]:
            sides = (node.expr, node.ops[0].expr)
            has_none = any(isinstance(side, nodes.Const) and side.value is None for side in sides)
            return has_none and any(map(self._content.is_value, sides))
        is_test = isinstance(node, nodes.Test) and node.name == "none"
        return is_test and self._content.is_value(node.node)

    def _mentions(self, name: str, root: Any) -> bool:
        """Return whether *root* has an attribute or a string of that name."""
        below = (placed.node for placed in self._syntax.below(root))
        return any(name in (getattr(n, "attr", None), getattr(n, "value", None)) for n in below)

    def _use_of_arguments(self, placed: Placed) -> str | None:
        """Return how the template uses the arguments at this node: as text, an object, or None."""
        node = placed.node
        if not self._arguments.is_read(node):
            return None
        for above in placed.above:
            if not self._passes_on(node, above):
                return self._kind_of_use(node, above)
            node = above
        return None

    def _passes_on(self, node: Any, above: Any) -> bool:
        """Return whether the value of *node* may be that of the expression around it."""
        if isinstance(above, nodes.CondExpr):
            return node is not above.test
        is_default = isinstance(above, nodes.Filter) and above.name in _TRANSPARENT_FILTERS
        return is_default or isinstance(above, nodes.Or)

    def _kind_of_use(self, node: Any, above: Any) -> str | None:
        if isinstance(above, nodes.Output | nodes.Add | nodes.Concat):
            return "text"
        if isinstance(above, nodes.Filter):
            return "text" if above.name in _FILTERS_OF_TEXT else "object"
        if isinstance(above, nodes.Getattr):
            return "text" if hasattr(str, above.attr) else "object"
        if isinstance(above, nodes.Getitem) and node is above.node:
            return "text" if isinstance(above.arg, nodes.Slice) else "object"
        return "object" if isinstance(above, nodes.For) else None
