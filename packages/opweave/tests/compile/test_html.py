"""The page of a compilation: what it shows, that nothing escapes, and how a browser shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path

import pytest

from opweave.compile.html import diff, lines_of, render
from opweave.compile.report import MatchReport, NodeReport, PassReport, Refusal, Report, Reuse
from support import browser

STYLE = Path(render.__code__.co_filename).with_name("templates").joinpath("style.css").read_text()
HOSTILE = "</script></style><img src=x onerror=\"alert('1')\"><!-- &amp; \x00\x1b\u202e\udcff"
EMPTY = {"meta", "link", "input", "br", "wbr"}


def graph(*lines: str) -> str:
    return "\n\n\n\ndef forward(self, x, w):\n" + "".join(f"    {line}\n" for line in lines)


def full_report(layers: int = 12) -> Report:
    """Return a report that has something of everything."""
    nodes = []
    for i in range(layers):
        source = f"/home/ada/models/llama.py:{i + 30}: y, r = ir.ops.fused_add_rms_norm(x, r, w)"
        nodes += [
            NodeReport(
                f"fused_add_rms_norm_annotated_{i}", "fused_add_rms_norm", source,
                "x=bfloat16[s72, 4096] cpu, epsilon=1e-06", "opweave_c",
                [Refusal("triton", "x: cpu (supports cuda)", "platform default, cpu")],
                "lower in place", [f"add_{i}", f"rms_norm_{i}"],
                [
                    Reuse("x", True, "", copied=False),
                    Reuse("x_residual", False, "the graph returns it", copied=True),
                ],
            ),
            NodeReport(
                f"linear_{i}", "linear", f"/home/ada/linear.py:{i}: F", "", "native", [],
                "lower functional",
            ),
        ]  # fmt: skip
    before = [f"x{i} = torch.ops.aten.relu.default(x{i - 1});  x{i - 1} = None" for i in range(90)]
    after = [*before[:40], "kernel_40 = torch.ops.other.default(x39)", *before[41:]]
    return Report(
        complete=True, seconds=1.25, traces=4, nodes=nodes,
        fusions=[
            MatchReport("fused_add_rms_norm", nodes[0].node, "fused", "add, rms_norm"),
            MatchReport("silu_and_mul_quant", "mul_3", "rejected", "operand x of silu differs"),
        ],
        passes=[
            PassReport("carry donations", "dynamo", 0.00001),
            PassReport("fuse", "joint", 1.2, graph(*before), graph(*after), ["one", "two"]),
            PassReport("lower in place", "post grad", 0.02, graph("x = 1"), graph("x = 2")),
        ],
        collectives={"all_gather": 3},
    )  # fmt: skip


class Parsed(HTMLParser):
    """The elements of a page; complains where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def test_every_decision_is_on_the_page() -> None:
    report = full_report()
    shown = Parsed(render([report], "A model")).text
    for node in report.nodes:
        for said in (node.node, node.op, node.chosen, *node.fused_from):
            assert said in shown
    for said in (
        "A model", "models/llama.py:30", "triton", "x: cpu (supports cuda)", "platform default",
        "the graph returns it", "operand x of silu differs", "near miss", "carry donations",
        "< 0.1 ms", "1.2 s", "all_gather calls", "12 calls 50%", "12 avoided by reuse",
    ):  # fmt: skip
        assert said in shown


def test_calls_of_identical_layers_share_a_row() -> None:
    def call(i: int, chosen: str = "native") -> NodeReport:
        module = f"model.layers.{i}.mlp"
        return NodeReport(
            f"linear_{i}", "linear", "/m.py:1: F", "x", chosen, [], "lower functional",
            module=module, bytes=24_576,
        )  # fmt: skip

    report = Report(complete=True, nodes=[*map(call, range(3)), call(3, "opweave_c")])
    assert [len(group) for group in report.layer_groups()] == [3, 1]
    text = Parsed(render([report], "A model")).text
    for shown in ("model.layers.*.mlp", "3 calls", "model.layers.3.mlp", "24.6 kB", "linear_2"):
        assert shown in text


def test_only_reused_memory_is_shown_as_good() -> None:
    reuses = [
        Reuse("x", True, "", copied=False),
        Reuse("y", False, "the graph returns it", copied=True),
        Reuse("z", False, "another activation may not be reused", copied=False),
    ]
    node = NodeReport("n", "op", "/m.py:1", "", "c", [], "lower in place", reuse=reuses)
    page = render([Report(complete=True, nodes=[node])], "A model")
    assert '<b class="good">reuses</b>' in page
    assert '<b class="bad">copies</b>' in page
    assert "<b>leaves</b>" in page


def test_the_head_says_what_the_page_was_made_with() -> None:
    facts = {"torch": "2.13.0", "command": "opweave explain 'a <b>'"}
    text = Parsed(render([], "A model", facts)).text
    assert "2.13.0" in text
    assert "opweave explain 'a <b>'" in text


def test_headings_tables_and_anchors_are_in_order() -> None:
    page = Parsed(render([full_report(), full_report(1)], "Two graphs"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] or "" for tag, a in page.elements if tag == "a"]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert page.count("caption") == page.count("table")
    scopes = {a.get("scope") for tag, a in page.elements if tag == "th"}
    assert scopes == {"col", "row"}


def test_nothing_is_loaded() -> None:
    page = render([full_report()], "A model")
    assert not re.search(r"https?:|url\(|@import|//[a-z]", page)
    for tag, attributes in Parsed(page).elements:
        assert "src" not in attributes
        assert tag != "script" or not attributes
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))


def test_hostile_text_stays_text() -> None:
    refusal, reuse = Refusal(HOSTILE, HOSTILE, HOSTILE), Reuse(HOSTILE, False, HOSTILE, copied=True)
    report = Report(
        key=HOSTILE, complete=True, collectives={HOSTILE: 1},
        nodes=[
            NodeReport(
                HOSTILE, HOSTILE, f"/a/{HOSTILE}.py:3: {HOSTILE}", HOSTILE, HOSTILE, [refusal],
                HOSTILE, [HOSTILE], [reuse],
            )
        ],
        fusions=[MatchReport(HOSTILE, HOSTILE, kind, HOSTILE) for kind in ("fused", "rejected")],
        passes=[PassReport(HOSTILE, HOSTILE, 1.0, HOSTILE, f"{HOSTILE} changed", [HOSTILE])],
    )  # fmt: skip
    page = render([report, report], HOSTILE)
    page.encode("utf-8")
    assert "\x00" not in page
    assert "\u202e" not in page
    parsed = Parsed(page)
    assert parsed.count("img") == 0
    assert parsed.count("script") == parsed.count("style") == 1
    assert not any(name.startswith("on") for _, attrs in parsed.elements for name in attrs)
    assert "alert('1')" in parsed.text


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([], "Nothing was compiled"),
        ([Report()], "TORCHINDUCTOR_FORCE_DISABLE_CACHES"),
        ([Report(complete=True)], "does not call any opweave op"),
        ([replace(full_report(), from_cache=True)], "this one came from the cache"),
    ],
)
def test_reports_with_little_in_them(reports: list[Report], said: str) -> None:
    assert said in Parsed(render(reports, "x")).text


def test_diff_marks_the_line_and_the_word() -> None:
    same = [f"a{i} = f(a{i - 1})" for i in range(50)]
    before, after = graph(*same, "y = g(x, 1)"), graph(*same, "y = g(x, 2)", "z = h(y)")
    changed = diff(before, after)
    assert (changed.removed, changed.added) == (1, 2)
    page = render(
        [Report(complete=True, passes=[PassReport("p", "joint", 1.0, before, after)])], ""
    )
    assert "<mark>1</mark>" in page
    assert "<mark>2</mark>" in page
    assert "48 unchanged lines" in page  # with the signature, without three context lines


def test_diff_of_all_and_nothing() -> None:
    assert diff(graph("x = 1"), graph("x = 1"))[1:] == (0, 0)
    assert diff("", graph("x = 1")).added == 2
    assert diff("old " * 5, "another thing").removed == 1


def test_lines_are_shown_without_what_they_free() -> None:
    long = ", ".join(f'a{i} : "Sym(s{i}, {i})"' for i in range(20))
    lines = lines_of(
        f"\n\ndef forward(self, {long}):\n    b = f(a1);  a1 = None\n"
        "    c = g(b, '; x = None');  b = a2 = None\n    return c\n    "
    )
    assert lines[:3] == ["def forward(", "    self,", '    a0 : "Sym(s0, 0)",']
    assert lines[-4:] == ["):", "    b = f(a1)", "    c = g(b, '; x = None')", "    return c"]


def test_large_graphs_take_seconds_at_most() -> None:
    lines = [f"x{i} = torch.ops.aten.mm.default(x{i - 1}, w{i})" for i in range(4000)]
    halved = [f"{line};" if i % 5 == 0 else line for i, line in enumerate(lines)]
    assert diff(graph(*lines), graph(*halved)).added == 800


PALETTES = [
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
]


@pytest.mark.parametrize("palette", PALETTES, ids=["light", "dark"])
def test_colors_can_be_told_apart(palette: dict[str, str]) -> None:
    grounds = ("page", "box")
    fores = ("text", "dim", "link", "good", "bad")
    pairs = [(fore, back, 4.5) for fore, back in product(fores, grounds)]
    pairs += [("text", back, 4.5) for back in ("del", "del-word", "ins", "ins-word")]
    pairs += [(f"color-{i}", back, 3.0) for i, back in product(range(7), grounds)]
    for fore, back, least in pairs:
        assert contrast(palette[fore], palette[back]) >= least, (fore, back)


def contrast(first: str, second: str) -> float:
    """Return the ratio that WCAG 2 defines."""
    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(s * weight for s, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """A browser that shows the page of two graphs."""
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM to one")
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "page.html"
    report = full_report()
    file.write_text(render([report, replace(report, from_cache=True)], "A model"), encoding="utf-8")
    with browser.browser(executable, folder / "profile") as opened:
        opened.file = file
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_browser_shows_the_page_in_its_window(page: browser.Page, width: int, dark: bool) -> None:
    page.open(page.file, width=width, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.calls').scrollWidth") > 390  # in its own box
    cut_off = "[...document.querySelectorAll('.pass')].filter(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{cut_off}.length") == 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    assert page.complaints == []
    assert set(page.requests) == {page.file.as_uri()}


def test_browser_puts_before_and_after_side_by_side_or_stacked(page: browser.Page) -> None:
    places = """(() => {
        const box = kind => document.querySelector(`.pass ${kind}`).getBoundingClientRect();
        const [before, after] = [box('.line.del'), box('.line.ins')];
        return [before.right <= after.left, before.top === after.top, before.bottom <= after.top];
    })()"""
    page.open(page.file, width=1280)
    assert page.evaluate(places) == [True, True, False]
    page.open(page.file, width=390)
    assert page.evaluate(places) == [False, False, True]


def test_browser_filters_calls(page: browser.Page) -> None:
    page.open(page.file, width=1280)
    shown = """(() => {
        const box = document.querySelector('.filtered');
        const rows = [...box.querySelectorAll('tbody tr')];
        return [rows.filter(row => row.offsetHeight > 0).length, box.querySelector('output').value];
    })()"""
    choose = """(name, value) => {
        const field = document.querySelector('.filtered form').elements[name];
        field.value = value;
        field.dispatchEvent(new Event('input', {bubbles: true}));
    }"""
    assert page.evaluate(shown) == [24, "24 of 24 calls"]
    page.evaluate(f"({choose})('provider', 'native')")
    assert page.evaluate(shown) == [12, "12 of 24 calls"]
    page.evaluate(f"({choose})('text', 'LINEAR_11 linear.py')")
    assert page.evaluate(shown) == [1, "1 of 24 calls"]
    page.evaluate(f"({choose})('op', 'fused_add_rms_norm')")
    assert page.evaluate(shown) == [0, "0 of 24 calls"]
    assert page.complaints == []


def test_browser_unfolds_the_graph_that_a_link_names(page: browser.Page) -> None:
    page.open(page.file, width=1280)
    named = "document.getElementById('graph-1-pass-1')"
    page.evaluate(f"{named}.open = false")
    page.evaluate("document.querySelector('.passes a').click()")
    page.evaluate("new Promise(go => setTimeout(go, 100))")
    assert page.evaluate(f"{named}.open") is True
