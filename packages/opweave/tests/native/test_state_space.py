"""The state-space scans: every provider against the recurrence, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from native.packed import by_sequence, layout, pack
from opweave import ir
from opweave.ir.ops.state_space import linear_recurrence

SCAN, SSD, UPDATE = ir.ops.selective_scan, ir.ops.ssd_chunk_scan, ir.ops.selective_state_update
CONV, CONV_UPDATE = ir.ops.causal_conv1d, ir.ops.causal_conv1d_update
EVERY = (CONV, CONV_UPDATE, SCAN, UPDATE, SSD)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
each_provider = pytest.mark.parametrize("provider", SCAN.supported_providers())
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_op = pytest.mark.parametrize("op", EVERY, ids=lambda op: op.name)

Vectors = dict[str, Any]


def oracle(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor | None, h: Tensor, given: Vectors
) -> tuple[Tensor, Tensor]:
    """One sequence of heads, ``x`` ``(T, H, P)``, ``dt`` the same; ``a`` ``(H, P, N)``; float64."""
    ys, h, state_dtype = [], h.double(), h.dtype
    share = x.shape[1] // b.shape[1]
    for t in range(len(x)):
        step = dt[t].double()
        if given["dt_bias"] is not None:
            step = step + given["dt_bias"].double()
        if given["dt_softplus"]:
            step = torch.where(step > 30, step, step.exp().log1p())
        low, high = given["dt_min"] or 0.0, given["dt_max"] or float("inf")
        step = step.clamp(low, high)
        keys, queries = (v[t].double().repeat_interleave(share, 0)[:, None] for v in (b, c))
        inputs = (step * x[t].double())[..., None] * keys
        h = torch.exp(step[..., None] * given["a"].double()) * h + inputs
        y = (h * queries).sum(-1)
        if given["d"] is not None:
            y = y + given["d"].double() * x[t].double()
        ys.append(y if z is None else y * z[t].double() * torch.sigmoid(z[t].double()))
    return torch.stack(ys).to(x.dtype) if ys else x, h.to(state_dtype)


def check(op: ir.IrOp, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for mine, exact in zip(found, wanted, strict=True):
        atol, rtol = op.get_tolerance(exact.dtype)
        torch.testing.assert_close(mine, exact, atol=atol, rtol=rtol)


def vectors(tokens: int, groups: int, dtype: torch.dtype, **changes: Any) -> Vectors:
    """Arguments of ``ssd_chunk_scan`` by name: 4 heads of 3, 5 states, 7 slots."""
    found: Vectors = {
        "x": torch.randn(tokens, 4, 3).to(dtype),
        "dt": torch.randn(tokens, 4).to(dtype),
        "a": -torch.rand(4) * 2 - 0.1,
        "b": torch.randn(tokens, groups, 5).to(dtype),
        "c": torch.randn(tokens, groups, 5).to(dtype),
        "d": torch.randn(4),
        "z": torch.randn(tokens, 4, 3).to(dtype),
        "dt_bias": torch.randn(4),
        "x_state": torch.randn(7, 4, 3, 5).to(torch.promote_types(dtype, torch.float32)),
        "dt_softplus": True,
        "dt_min": None,
        "dt_max": None,
    }
    return {**found, **changes}


VARIANTS: list[dict[str, Any]] = [
    {},
    {"z": None, "d": None},
    {"dt_bias": None, "dt_min": 0.2, "dt_max": 0.9},
    {"z": None, "dt_max": 0.5},
]


def by_heads(v: Vectors, packing: Any) -> tuple[Tensor, Tensor]:
    """The oracle for arguments of ``ssd_chunk_scan``."""
    x, z, given = v["x"], v["z"], dict(v)
    given["a"] = v["a"][:, None, None]
    for name in ("d", "dt_bias"):
        given[name] = None if v[name] is None else v[name][:, None]

    def one(*parts: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c, *rest = parts
        return oracle(x, dt[..., None], b, c, rest[0] if z is not None else None, rest[-1], given)

    others = [v["dt"], v["b"], v["c"], *([] if z is None else [z])]
    return by_sequence(packing, x, v["x_state"], one, *others)


@pytest.fixture(autouse=True)
def _no_grad(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


def run(op: ir.IrOp, provider: str, v: Vectors, packing: Any, **options: Any) -> Any:
    names = ("query_start_loc", "slot_idx", "has_initial_state")
    where = dict(zip(names, packing.arguments, strict=True))
    return op.using(f"{provider}!")(**v, **where, **options)


@each_provider
@each_dtype
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(v) or "all")
def test_ssd_is_the_recurrence(provider: str, dtype: torch.dtype, variant: dict[str, Any]) -> None:
    for i, lengths in enumerate([[5, 1, 9, 3], [2, 0, 3], [0, 4], [4, 0], [0], []]):
        packing = layout(lengths, slots=7, after=2 * (i % 2))
        v = vectors(packing.tokens, (1, 2, 4)[i % 3], dtype)
        v |= variant
        found = run(SSD, provider, v, packing, chunk_size=(4, 1, 3)[i % 3])
        check(SSD, found, by_heads(v, packing))


@each_provider
@each_dtype
@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda v: ",".join(v) or "all")
def test_selective_scan_is_the_recurrence(
    provider: str, dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    for i, lengths in enumerate([[20, 1, 37, 3], [2, 0, 3], [0, 4], [4, 0], [0], []]):
        packing = layout(lengths, slots=7, after=2 * (i % 2))
        tokens, groups = packing.tokens, (1, 2, 3)[i % 3]
        v = vectors(tokens, groups, dtype)
        x, dt, z = (torch.randn(tokens, 6).to(dtype) for _ in range(3))
        state, a = v["x_state"][:, 0, :1].expand(7, 6, 5) + 0, -torch.rand(6, 5) - 0.1
        d, bias = torch.randn(2, 6)
        v |= {"x": x, "dt": dt, "z": z, "a": a, "d": d, "dt_bias": bias, "x_state": state} | variant
        if groups == 1:
            v |= {"b": v["b"][:, 0], "c": v["c"][:, 0]}
        given = {n: v.pop(n) for n in ("dt_min", "dt_max")} | v
        found = run(SCAN, provider, v, packing)
        heads = {n: v[n][..., None] if v[n] is not None else None for n in ("x", "z")}
        given["a"] = a[:, None]
        for name in ("d", "dt_bias"):
            given[name] = None if v[name] is None else v[name][:, None]

        def one(*parts: Tensor, given: Vectors = given) -> tuple[Tensor, Tensor]:
            x, dt, b, c, *rest = parts
            b, c = (t if t.ndim == 3 else t[:, None] for t in (b, c))
            return oracle(x, dt, b, c, rest[0] if len(rest) > 1 else None, rest[-1], given)

        others = [dt[..., None], v["b"], v["c"], *([] if heads["z"] is None else [heads["z"]])]
        y, new = by_sequence(packing, heads["x"], state[:, :, None], one, *others)
        check(SCAN, found, (y[..., 0], new[:, :, 0]))


@each_provider
@each_dtype
def test_update_is_a_step_of_the_scans(provider: str, dtype: torch.dtype) -> None:
    update = UPDATE.using(f"{provider}!")
    for slots in ([3, 0, 6], [2, -1, 4], [-1], []):
        packing = layout([1] * len(slots), slots=7, after=0)
        index, known = torch.tensor(slots, dtype=torch.int32), torch.ones(len(slots)).bool()
        v = vectors(packing.tokens, 2, dtype, dt_max=0.7)
        where = {"query_start_loc": pack(packing.lengths), "has_initial_state": known}
        found = update(**v, slot_idx=index)
        check(UPDATE, found, SSD.native(**v, **where, slot_idx=index))
        # A head's elements may differ, and are the channels of Mamba-1 then.
        wide = {n: v[n][:, None].expand(4, 3) for n in ("d", "dt_bias")}
        wide |= {
            "a": v["a"][:, None, None].expand(4, 3, 5),
            "dt": v["dt"][..., None].expand(-1, 4, 3),
        }
        check(UPDATE, update(**{**v, **wide}, slot_idx=index), found)
        if len(slots) == 0:
            continue
        flat = {n: t.flatten(0, 1) for n, t in wide.items() if n != "dt"}
        flat |= {
            n: t.flatten(1, 2) for n, t in {**v, **wide}.items() if n in ("x", "z", "dt", "x_state")
        }
        del v["dt_max"], v["dt_min"]
        scanned = SCAN.native(**{**v, **flat}, **where, slot_idx=index)
        check(UPDATE, update(**{**v, **flat}, slot_idx=index), scanned)


@each_provider
def test_any_chunk_size_and_any_split_give_the_same(provider: str) -> None:
    ssd, update = SSD.using(f"{provider}!"), UPDATE.using(f"{provider}!")
    v = vectors(13, 2, torch.float64)
    state, slot, no, yes = v.pop("x_state"), torch.tensor([5]), *torch.tensor([[False], [True]])
    whole = ssd(**v, x_state=state, query_start_loc=pack([13]), slot_idx=slot, has_initial_state=no)
    for size in (1, 2, 5, 13, 64):
        options = {"slot_idx": slot, "chunk_size": size}
        one = ssd(**v, x_state=state, query_start_loc=pack([13]), has_initial_state=no, **options)
        check(SSD, one, whole)
        for cut in (1, 6, 12):
            first = {n: t[:cut] if n in ("x", "dt", "b", "c", "z") else t for n, t in v.items()}
            rest = {n: t[cut:] if n in ("x", "dt", "b", "c", "z") else t for n, t in v.items()}
            y, h = ssd(
                **first, x_state=state, query_start_loc=pack([cut]), has_initial_state=no, **options
            )
            more, last = ssd(
                **rest,
                x_state=h,
                query_start_loc=pack([13 - cut]),
                has_initial_state=yes,
                **options,
            )
            check(SSD, (torch.cat((y, more)), last), whole)
            for t in range(cut, 13):  # and decoded
                token = {n: v[n][t : t + 1] for n in ("x", "dt", "b", "c", "z")}
                step, h = update(**{**v, **token}, x_state=h, slot_idx=slot)
                check(UPDATE, (step[0],), (whole[0][t],))


@each_provider
def test_split_selective_scan(provider: str) -> None:
    scan, update = SCAN.using(f"{provider}!"), UPDATE.using(f"{provider}!")
    values = SCAN.generate_inputs(num_tokens=40, dtype=torch.float64)
    v = dict(zip(SCAN.schema.names, values, strict=True))
    state, slot, no, yes = v.pop("x_state"), torch.tensor([1]), *torch.tensor([[False], [True]])
    for name in ("query_start_loc", "has_initial_state", "slot_idx"):
        del v[name]
    whole = scan(
        **v, x_state=state, query_start_loc=pack([40]), slot_idx=slot, has_initial_state=no
    )
    for cut in (1, 17, 37):
        first = {n: t[:cut] if n in ("x", "dt", "b", "c", "z") else t for n, t in v.items()}
        y, h = scan(
            **first, x_state=state, query_start_loc=pack([cut]), slot_idx=slot, has_initial_state=no
        )
        check(SCAN, (y,), (whole[0][:cut],))
        rest = {n: t[cut:] if n in ("x", "dt", "b", "c", "z") else t for n, t in v.items()}
        again = scan(
            **rest,
            x_state=h,
            query_start_loc=pack([40 - cut]),
            slot_idx=slot,
            has_initial_state=yes,
        )
        check(SCAN, again, (whole[0][cut:], whole[1]))
    for t in range(37, 40):
        token = {n: v[n][t : t + 1] for n in ("x", "dt", "b", "c", "z")}
        step, h = update(**{**v, **token}, x_state=h, slot_idx=slot)
        check(UPDATE, (step[0],), (whole[0][t],))
    check(UPDATE, (h,), (whole[1],))


@each_provider
@pytest.mark.parametrize("name", ["x", "dt", "b", "c", "z"])
@pytest.mark.parametrize("op", [SCAN, SSD], ids=lambda op: op.name)
def test_what_is_not_finite_stays_in_its_sequence(provider: str, op: ir.IrOp, name: str) -> None:
    """NaN in one token, with more tokens than a block has: in a sequence, and in padding."""
    given = dict(zip(op.schema.names, op.generate_inputs(num_tokens=60), strict=True))
    given |= {
        "query_start_loc": torch.tensor([0, 20, 41, 43, 56], dtype=torch.int32),
        "slot_idx": torch.tensor([2, 0, -1, 1]),
        "has_initial_state": torch.tensor([True, False, True, True]),
    }
    attend = op.using(f"{provider}!")
    clean = attend(**given)
    for bad, spoilt, slots in ((30, range(30, 41), [0]), (42, (), []), (58, (), [])):
        broken = given[name].clone()
        broken[bad] = float("nan")
        y, state = attend(**{**given, name: broken})
        rows, others = [*spoilt], [i for i in range(60) if i not in spoilt]
        torch.testing.assert_close(y[others], clean[0][others])
        kept = [slot for slot in range(len(state)) if slot not in slots]
        torch.testing.assert_close(state[kept], clean[1][kept])
        if name in ("x", "dt", "b"):
            assert y[rows].isnan().all()
            assert state[slots].isnan().all()


def test_blocks_of_the_recurrence_hold_back_what_is_not_finite() -> None:
    """Longer than 16 * 16 steps, so that blocks of blocks have beginnings, too."""
    gate, value = torch.rand(600, 2), torch.randn(600, 2)
    begins = torch.zeros(600, 1, dtype=torch.bool)
    begins[[40, 41, 304, 560]] = True
    gate[300, 0], value[37, 0], value[556, 0] = float("nan"), float("inf"), float("nan")
    found, h = linear_recurrence(gate, value, begins), torch.zeros(2)
    for t in range(600):
        h = value[t] if begins[t] else gate[t] * h + value[t]
        torch.testing.assert_close(found[t], h, equal_nan=True)


@each_op
def test_gradients_of_native(op: ir.IrOp) -> None:
    sizes = {"num_tokens": 5, "dtype": torch.float64}
    small = {"hidden_size": 3, "state_size": 2, "num_heads": 2, "head_size": 2, "width": 3}
    known = op.input_generator.__code__.co_varnames
    values = op.generate_inputs(**sizes, **{n: s for n, s in small.items() if n in known})
    leaves = tuple(
        v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
    )
    assert torch.autograd.gradcheck(op, leaves)


def test_compiled_scans_are_the_eager_ones() -> None:
    v, packing = vectors(9, 2, torch.float32), layout([4, 5], slots=7, after=0)

    def both(v: Vectors, where: tuple[Tensor, ...]) -> Any:
        starts, slots, known = where
        y, state = SSD.maybe_inplace(*(v[n] for n in SSD.schema.names[:9]), starts, slots, known, 4)
        return y * 2, state

    wanted = both({**v, "x_state": v["x_state"].clone()}, packing.arguments)
    compiled = torch.compile(both, backend="opweave", fullgraph=True)
    check(SSD, compiled(v, packing.arguments), wanted)


@each_provider
@pytest.mark.parametrize("op", [SCAN, UPDATE, SSD], ids=lambda op: op.name)
def test_errors_say_what_is_wrong(provider: str, op: ir.IrOp) -> None:
    good = dict(zip(op.schema.names, op.generate_inputs(num_tokens=6), strict=True))
    bad: list[tuple[str, Any, str]] = [
        ("x", torch.randn(6), "x must be"),
        ("dt", torch.randn(5, 4), "dt must be"),
        ("a", torch.randn(7), "a must be"),
        ("b", good["b"][:5], "b must be"),
        ("c", good["c"][:, :0], "c must be"),
        ("d", torch.randn(1), "d must be"),
        ("z", torch.randn(6, 1), "z must be"),
        ("dt_bias", torch.randn(2), r"dt_bias must be \((24|4),\); found float32, \(2,\)"),
        ("x_state", torch.randn(3), "x_state must be"),
        ("slot_idx", torch.tensor([0.5]), "slot_idx must be int32 or int64"),
    ]
    if "query_start_loc" in good:
        bad += [
            ("query_start_loc", torch.tensor([0, 6]), r"query_start_loc must be .* \(3,\)"),
            ("has_initial_state", torch.tensor([0, 1]), "has_initial_state must be bool"),
        ]
    if op is SSD:
        bad += [
            ("chunk_size", 0, "chunk_size=0 is not positive"),
            ("b", torch.randn(6, 3, 5), "b must be .*a divisor of 4"),
        ]
    for name, value, message in bad:
        with pytest.raises(ValueError, match=f"{op.name}: {message}"):
            op.using(f"{provider}!")(**{**good, name: value})
    for slot in (-2, 11):
        outside = torch.full_like(good["slot_idx"], slot)
        with pytest.raises(IndexError):
            op.using(f"{provider}!")(**{**good, "slot_idx": outside})


def test_softplus_of_large_steps_and_no_overflow_above_the_diagonal() -> None:
    """Fast decay over a long chunk: exponents of the part that is not used would overflow."""
    v = vectors(64, 1, torch.float32, a=torch.full((4,), -16.0), dt_bias=torch.full((4,), 25.0))
    packing = layout([64], slots=7, after=0)
    wanted = by_heads(v, packing)
    for provider in SSD.supported_providers():
        found = run(SSD, provider, v, packing)
        atol = 1e-5 * float(wanted[0].abs().max())
        torch.testing.assert_close(found[0], wanted[0], atol=atol, rtol=1e-4)
    assert torch.isfinite(functional.softplus(v["dt"]).sum())
