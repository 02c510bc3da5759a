"""Every way in which plugins go wrong, in a fresh interpreter, and some in a child it spawns.

Each ends in one readable message that says the way out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from support.fixtures import FreshPython

from .helpers import GENERAL, PLATFORM, files, plugin

HERE = Path(__file__).parent

PLATFORM_SOURCE = """
    def register():
        return __name__ + ".Acme"

    def __getattr__(name):
        if name != "Acme":
            raise AttributeError(name)
        from opweave.platforms import Platform
        class Acme(Platform):
            name = __name__.removesuffix("_module")
            device_type = "cpu"
            HOOK
        return Acme
"""
BROKEN_HOOK = """
            def import_kernels(self):
                raise OSError("no bus")
"""
RESOLVE = """
    from opweave.platforms import current_platform
    result = current_platform.name
"""
LOAD = """
    from opweave.plugins import load_general_plugins, plugin_report
    load_general_plugins()
    result = [record.state for record in plugin_report()]
"""
USE = """
    import torch
    from opweave import ir
    ir.ops.relu2(torch.ones(2))
"""
REGISTERS = """
    from opweave import ir
    from torch import Tensor
    def register():
        @ir.register_op(name="NAME")
        def _(x: Tensor) -> Tensor:
            return x * 3
        THEN
"""


def platform(name: str, hook: str = "") -> dict[str, str]:
    return plugin(name, PLATFORM_SOURCE.replace("HOOK", hook), PLATFORM)


def registers(name: str, op: str, then: str = "pass") -> dict[str, str]:
    return plugin(name, REGISTERS.replace("NAME", op).replace("THEN", then))


class Row(NamedTuple):
    """The installed packages and settings, the action, and the expected outcome."""

    files: dict[str, str]
    code: str
    error: str | None = None
    message: tuple[str, ...] = ()
    result: Any = None
    env: Mapping[str, str] = {}
    warning: str = ""


ROWS = {
    "two plugins claim the device": Row(
        platform("acme") | platform("bold"),
        RESOLVE,
        "PlatformConflictError",
        ("acme of acme (acme 1.0); bold of bold (bold 1.0)", "OPWEAVE_PLATFORM=acme"),
    ),
    "a platform plugin cannot be imported": Row(
        plugin("acme", "raise ImportError('undefined symbol: _ZN3c10')", PLATFORM),
        RESOLVE,
        "PluginImportError",
        (
            "platform plugin 'acme' (acme_module:register, of acme 1.0)",
            "ImportError: undefined symbol: _ZN3c10",
            "OPWEAVE_PLUGINS=-acme",
            "pip uninstall acme",
        ),
    ),
    "it is left out": Row(
        plugin("acme", "raise ImportError('undefined symbol: _ZN3c10')", PLATFORM),
        RESOLVE,
        result="cpu",
        env={"OPWEAVE_PLUGINS": "-acme"},
    ),
    "a platform plugin raises": Row(
        plugin("acme", "def register(): raise OSError('no bus')", PLATFORM),
        RESOLVE,
        "PluginFailedError",
        ("platform plugin 'acme'", "OSError: no bus", "acme_module.py:1", "OPWEAVE_PLUGINS=-acme"),
    ),
    "blanks in OPWEAVE_PLUGINS": Row(
        platform("acme") | platform("bold"),
        RESOLVE,
        result="acme",
        env={"OPWEAVE_PLUGINS": " acme, "},
    ),
    "the selected platform is absent": Row(
        plugin("acme", "def register(): return None", PLATFORM),
        RESOLVE,
        "PlatformAbsentError",
        ("OPWEAVE_PLATFORM=acme", "Unset OPWEAVE_PLATFORM"),
        env={"OPWEAVE_PLATFORM": "acme"},
    ),
    "a platform plugin asks for the platform": Row(
        plugin(
            "acme",
            """
            def register():
                try:
                    from opweave.platforms import current_platform
                except Exception:
                    pass
                return "acme_module.Acme"
            """,
            PLATFORM,
        ),
        RESOLVE,
        "PlatformReentryError",
        ("platform plugin 'acme'", "current_platform", "import_kernels", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a platform plugin uses an op": Row(
        plugin(
            "acme",
            """
            def register():
                import torch
                from opweave import ir
                ir.ops.relu2(torch.ones(2))
            """,
            PLATFORM,
        ),
        RESOLVE,
        "PlatformReentryError",
        ("platform plugin 'acme'", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a general plugin asks for the platform": Row(
        plugin("acme", "def register():\n  from opweave.platforms import current_platform"),
        LOAD,
        result=["loaded"],
    ),
    "an entry point that names nothing": Row(
        files("acme", {GENERAL: {"acme": "acme_module:register:x y !!"}}, ""),
        LOAD,
        "PluginTypeError",
        ("general plugin 'acme'", "'acme_module:register:x y !!' is not a package.module:function"),
    ),
    "a general plugin raises a BaseException": Row(
        plugin("acme", "class Odd(BaseException): pass\ndef register(): raise Odd('no bus')"),
        LOAD,
        "PluginFailedError",
        ("general plugin 'acme'", "Odd: no bus", "acme_module.py:2", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a general plugin raises what cannot be shown": Row(
        plugin(
            "acme", "class Odd(Exception):\n    def __str__(self): 1 / 0\ndef register(): raise Odd"
        ),
        LOAD,
        "PluginFailedError",
        ("general plugin 'acme'", "failed: Odd (at ", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a general plugin raises when an op is used": Row(
        registers("acme", "of_acme", "raise OSError('no bus')"),
        USE,
        "PluginFailedError",
        ("general plugin 'acme'", "OSError: no bus", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a general plugin raises when a model is optimized": Row(
        registers("acme", "of_acme", "raise OSError('no bus')"),
        """
        import opweave, torch
        opweave.optimize(torch.nn.LayerNorm(8))
        """,
        "PluginFailedError",
        ("general plugin 'acme'", "OSError: no bus", "OPWEAVE_PLUGINS=-acme"),
    ),
    "an op of a plugin that is not loaded yet": Row(
        registers("acme", "of_acme"),
        """
        from opweave import ir
        result = ir.ops.of_acme.name
        """,
        result="of_acme",
    ),
    "an op of a plugin that raises": Row(
        registers("acme", "of_acme", "raise OSError('no bus')"),
        """
        from opweave import ir
        ir.ops.of_acme
        """,
        "PluginFailedError",
        ("general plugin 'acme'", "OSError: no bus", "OPWEAVE_PLUGINS=-acme"),
    ),
    "a hook raises": Row(
        platform("acme", BROKEN_HOOK),
        USE,
        "PluginHookError",
        ("platform plugin 'acme'", "import_kernels", "OSError: no bus", "OPWEAVE_PLUGINS=-acme"),
    ),
    "an unknown op, of a plugin that failed": Row(
        registers("acme", "of_acme", "raise OSError('no bus')"),
        """
        from opweave import ir
        ir.ops.of_acme
        """,
        "UnknownOpError",
        ("unknown op 'of_acme'", "general plugin acme (acme 1.0)", "OSError: no bus"),
        env={"OPWEAVE_PLUGINS_STRICT": "0"},
        warning="general plugin 'acme'",
    ),
    "an unknown model, of a plugin that failed": Row(
        registers("acme", "of_acme", "raise OSError('no bus')"),
        """
        from opweave_engine.models.registry import model_class
        model_class({"architectures": ["AcmeForCausalLM"]})
        """,
        "UnsupportedModelError",
        ("AcmeForCausalLM", "general plugin acme (acme 1.0)", "OSError: no bus"),
        env={"OPWEAVE_PLUGINS_STRICT": "0"},
        warning="general plugin 'acme'",
    ),
}


CHILD_STEP = 5  # every fifth row also runs in the child

SCRIPT = """
    import json, multiprocessing, sys
    sys.path.insert(0, HERE)
    import rows_runner
    rows = json.load(sys.stdin)
    context = multiprocessing.get_context("spawn")
    arguments = rows[::CHILD_STEP], "in_child", "child.json"
    child = context.Process(target=rows_runner.run_into, args=arguments)
    child.start()
    found = rows_runner.run(rows, "in_parent")
    child.join()
    assert child.exitcode == 0
    print(json.dumps([found, json.load(open("child.json"))]))
"""


def test_every_row(fresh_python: FreshPython) -> None:
    """In one test, since both interpreters import torch."""
    rows = [
        {"name": str(i), "files": row.files, "code": dedent(row.code), "env": dict(row.env)}
        for i, row in enumerate(ROWS.values())
    ]
    script = SCRIPT.replace("HERE", repr(str(HERE))).replace("CHILD_STEP", str(CHILD_STEP))
    done = fresh_python(script, stdin=json.dumps(rows))
    parent, child = json.loads(done.stdout)
    wrong = [
        f"{name}, in {where}: {fault}; got {outcome}"
        for where, found in (("the interpreter", parent), ("its child", child))
        for i, (name, row) in enumerate(ROWS.items())
        if (outcome := found.get(str(i))) is not None
        for fault in faults(row, outcome)
    ]
    assert (len(parent), len(child)) == (len(ROWS), len(range(0, len(ROWS), CHILD_STEP)))
    assert not wrong, "\n".join(wrong)


def faults(row: Row, outcome: dict[str, Any]) -> list[str]:
    """Return the differences from the expectations of *row*."""
    found = []
    if outcome["error"] != row.error:
        found.append(f"expected {row.error or 'no error'}")
    found += [f"no {part!r}" for part in row.message if part not in outcome["message"]]
    lines = outcome["message"].splitlines()
    if len(lines) > 1 and not lines[1].startswith("To go on without"):
        found.append("several lines")
    if row.error is None and outcome["result"] != row.result:
        found.append(f"expected {row.result!r}")
    if row.warning and not any(row.warning in each for each in outcome["warnings"]):
        found.append(f"no warning of {row.warning!r}")
    if not row.warning and outcome["warnings"]:
        found.append("warns")
    return found
