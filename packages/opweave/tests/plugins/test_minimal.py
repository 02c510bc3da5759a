"""The smallest plugin, as the documentation prints it."""

from __future__ import annotations

import re
import tomllib

from support import ROOT
from support.fixtures import Case, FreshCases

from .helpers import files

PAGE = ROOT / "docs" / "how-to" / "plugins.md"


def test_it_runs_as_printed(fresh_cases: FreshCases) -> None:
    page = PAGE.read_text(encoding="utf-8")
    [module, *_] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [project, *_] = [tomllib.loads(t) for t in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    metadata = project["project"]
    assert len(module.splitlines()) <= 10
    [(group, [(name, value)])] = [(g, p.items()) for g, p in metadata["entry-points"].items()]
    assert value == "hello_kernels:register"
    distribution = files(metadata["name"], {group: {name: value}}, version=metadata["version"])
    fresh_cases(
        [
            Case(
                """
                x = torch.randn(4, 8)
                assert torch.equal(ir.ops.relu2.using("hello!")(x), x.clamp(min=0).square())
                assert str(ir.ops.relu2.impls["hello"].owner) == "hello (hello-kernels 0.1.0)"
                from opweave.plugins import plugin_report
                [record] = plugin_report()
                assert record.state == "loaded", record
                assert record.registered == ("implementation relu2:hello",)
                """,
                files={**distribution, "hello_kernels.py": module},
            )
        ]
    )
