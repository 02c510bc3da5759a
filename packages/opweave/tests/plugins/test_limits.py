"""The time limit of plugins, and the reported line of a hanging one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opweave.plugins.plugin import Limits, OvertimeError, run_within

SHORT = Limits(0.15, 0.15)


def in_a_thread(function: Callable[[], None]) -> None:
    """Call *function* in a thread that no signal reaches."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def directly(function: Callable[[], None]) -> None:
    function()


places = pytest.mark.parametrize("place", [directly, in_a_thread])


@places
def test_what_the_function_returns_or_raises(place: Callable[..., None]) -> None:
    results: list[int] = []
    place(lambda: results.append(run_within(SHORT, lambda: 3)))
    assert results == [3]
    with pytest.raises(KeyError, match="own"):
        place(lambda: run_within(SHORT, lambda: {}["own"]))  # type: ignore[arg-type, misc]


@places
@pytest.mark.parametrize(("importing", "fits"), [(5.0, True), (0.1, False)])
def test_importing_has_a_limit_of_its_own(
    place: Callable[..., None],
    importing: float,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(
        "import time\nfor _ in range(8): time.sleep(0.05)\n"
    )

    def imports() -> None:
        import slow_to_import  # type: ignore[import-not-found]  # noqa: F401

    try:
        if fits:
            place(lambda: run_within(Limits(0.15, importing), imports))
            return
        with pytest.raises(OvertimeError) as caught:
            place(lambda: run_within(Limits(9, importing), imports))
        assert caught.value.doing == "import"
        assert "slow_to_import.py:2, in <module>: for _" in caught.value.where
    finally:
        sys.modules.pop("slow_to_import", None)


@places
def test_where_it_hangs(place: Callable[..., None]) -> None:
    def hangs() -> None:
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(OvertimeError) as caught:
        place(lambda: run_within(SHORT, hangs))
    assert time.monotonic() - start < 2
    assert caught.value.doing == "run"
    assert caught.value.where.startswith(__file__)
    assert caught.value.where.endswith("in hangs: time.sleep(60)")


NUL = "<made by\0 a tool>"


@places
@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"co_linetable": b""}, "in hangs: def hangs() -> None:"),
        ({"co_filename": NUL}, f"{NUL}:"),
    ],
)
def test_code_that_hides_where_it_is(
    place: Callable[..., None], change: dict[str, Any], where: str
) -> None:
    def hangs() -> None:
        time.sleep(60)

    hangs.__code__ = hangs.__code__.replace(**change)
    with pytest.raises(OvertimeError) as caught:
        place(lambda: run_within(SHORT, hangs))
    assert where in caught.value.where


def test_one_that_cannot_be_ended_is_spoken_of_once() -> None:
    told: list[OvertimeError] = []
    goes_on = True

    def stubborn() -> None:
        while goes_on:
            with suppress(BaseException):
                time.sleep(60)

    def end(late: OvertimeError) -> None:
        nonlocal goes_on
        told.append(late)
        time.sleep(0.2)
        goes_on = False

    run_within(SHORT, stubborn, end)
    (late,) = told
    assert "in stubborn: time.sleep(60)" in late.where


def test_a_function_that_catches_everything_is_ended_all_the_same() -> None:
    caught: list[BaseException] = []

    def stubborn() -> None:
        for _ in range(3):
            try:
                time.sleep(60)
            except BaseException as error:
                caught.append(error)

    run_within(SHORT, stubborn)  # it did end
    assert len(caught) == 3


def test_alarms_of_others_arrive() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        run_within(Limits(5, 5), lambda: signal.raise_signal(signal.SIGALRM))
        assert heard == [signal.SIGALRM]
        with pytest.raises(OvertimeError):
            run_within(SHORT, lambda: time.sleep(60))
        signal.raise_signal(signal.SIGALRM)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_inside_another() -> None:
    def inner() -> None:
        with pytest.raises(OvertimeError):
            run_within(SHORT, lambda: time.sleep(60))

    run_within(Limits(9, 9), inner)
    with pytest.raises(OvertimeError) as caught:
        run_within(SHORT, lambda: run_within(Limits(9, 9), lambda: time.sleep(60)))
    assert caught.value.seconds == SHORT.running
