"""Changes of a configuration by a platform, with reasons; the user's values win."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opweave.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    KernelConfig,
    SchedulerConfig,
    compilation_config,
)
from opweave.config.patches import ConfigPatch, PatchError, apply_patches, origins
from opweave.config.values import Config
from opweave.ir.errors import SettingError
from opweave.platforms import configured
from opweave.platforms.base import UnsupportedByPlatformError

from .conftest import Acme

SOURCE = "platform acme"


def block_size(value: int, force: bool = False) -> ConfigPatch:
    return ConfigPatch("cache.block_size", value, "kernel alignment", force)


def apply(config: EngineConfig, *patches: ConfigPatch) -> EngineConfig:
    return apply_patches(config, patches, SOURCE)


# Applying


def test_a_patch_changes_one_value_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = EngineConfig(seed=3)
    with caplog.at_level(logging.INFO, "opweave"):
        after = apply(before, block_size(128))
    assert caplog.messages == ["platform acme set cache.block_size 64→128: kernel alignment"]
    assert after == replace(before, cache=CacheConfig(block_size=128))
    assert before.cache.block_size == 64
    assert str(after.cache.origin("block_size")) == "platform acme: kernel alignment"
    assert after.origin("seed").source == "given"
    assert after.origin("dtype").source == "default"


def test_what_the_user_gave_stays(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=64))  # the default, but asked for
    with caplog.at_level(logging.INFO, "opweave"):
        assert apply(config, block_size(128)).cache.block_size == 64
    (message,) = caplog.messages
    assert message.startswith("platform acme would set cache.block_size 64→128: kernel alignment.")
    assert message.endswith("The value is kept: given")


def test_force_overrides_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=64))
    assert apply(config, block_size(128, force=True)).cache.block_size == 128
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_later_patch_of_a_platform_holds() -> None:
    once = apply(EngineConfig(), block_size(128))
    assert apply(once, block_size(256)).cache.block_size == 256


def test_nothing_to_do_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig()
    with caplog.at_level(logging.INFO, "opweave"):
        assert apply(config) is apply(config, block_size(64)) is config
    assert not caplog.messages


def test_values_that_depend_on_each_other_change_together() -> None:
    tokens = ConfigPatch("scheduler.max_num_batched_tokens", 8, "a small device")
    sequences = ConfigPatch("scheduler.max_num_seqs", 8, "a small device")
    for patches in ((tokens, sequences), (sequences, tokens)):
        assert apply(EngineConfig(), *patches).scheduler.max_num_batched_tokens == 8
    with pytest.raises(SettingError, match=r"^platform acme: .*max_num_batched_tokens=8 is below"):
        apply(EngineConfig(), tokens)


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        (ConfigPatch("cache.blok_size", 1, "r"), ("cache has no 'blok_size'", "'block_size'?")),
        (ConfigPatch("caches.block_size", 1, "r"), ("EngineConfig has no", "'cache'?")),
        (ConfigPatch("cache", CacheConfig(), "r"), ("is a section", "'cache.block_size'")),
        (ConfigPatch("seed.value", 1, "r"), ("seed has no 'value'",)),
        (ConfigPatch("cache.origins", {}, "r"), ("cache has no 'origins'",)),
        (ConfigPatch("", 1, "r"), ("EngineConfig has no ''",)),
        (ConfigPatch("cache.block_size", 1, " "), ("without a reason",)),
        (("cache.block_size", 1), ("is not a ConfigPatch",)),
    ],
)
def test_a_patch_that_is_none(patch: Any, named: tuple[str, ...]) -> None:
    with pytest.raises(PatchError) as raised:
        apply(EngineConfig(), patch)
    for part in ("platform acme", *named):
        assert part in str(raised.value)


def test_patches_that_contradict_each_other() -> None:
    with pytest.raises(PatchError, match=r"block_size to 128 .* and to 256"):
        apply(EngineConfig(), block_size(128), block_size(256))
    assert apply(EngineConfig(), block_size(128), block_size(128)).cache.block_size == 128


def test_a_value_that_cannot_be() -> None:
    with pytest.raises(SettingError, match="platform acme: CacheConfig: block_size=0"):
        apply(EngineConfig(), block_size(0))


# Where values come from


def test_every_value_knows_where_it_comes_from() -> None:
    config = apply(EngineConfig(dtype="float32", compilation_config={"mode": 3}), block_size(128))
    found = {path: origin.source for path, origin in origins(config).items()}
    assert {path: source for path, source in found.items() if source != "default"} == {
        "dtype": "given",
        "compilation_config.mode": "compilation_config",
        "cache.block_size": "platform acme",
    }
    assert {"scheduler.policy", "kernel_config.ir_op_priority", "seed"} <= found.keys()


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        replace,
        lambda config: replace(config, seed=4),
    ],
)
def test_copies_know_it_too(again: Any) -> None:
    config = apply(EngineConfig(seed=4, cache=CacheConfig(64)), block_size(128, force=True))
    assert origins(again(config)) == origins(config)


def test_replacing_a_value_is_giving_it() -> None:
    config = replace(EngineConfig(), seed=3, cache=replace(CacheConfig(), block_size=32))
    assert config.origin("seed").by_user
    assert config.cache.origin("block_size").by_user
    assert not config.origin("dtype").by_user
    assert not config.cache.origin("num_blocks").by_user
    assert not replace(CompilationConfig(), mode=3).origin("custom_ops").by_user
    assert CompilationConfig(mode="0").origin("mode").by_user  # a default that is given


def test_sources_of_the_process_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CompilationConfig().updated({"custom_ops": "none"}, "--compilation-config.custom_ops")
    with compilation_config(config):
        found = EngineConfig().compilation.origin("custom_ops")
    assert (found.source, found.by_user) == ("--compilation-config.custom_ops", True)


def test_origins_are_no_part_of_what_a_config_says() -> None:
    assert CacheConfig(64) == CacheConfig()
    assert hash(CacheConfig(64)) == hash(CacheConfig())
    assert "origins" not in repr(EngineConfig())


@dataclass(frozen=True)
class Sizes(Config):
    a: int = 0
    b: int = 0
    c: int = 0


values = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))


@given(given_=values, patched=values, forced=st.sets(st.sampled_from("abc")))
def test_the_user_then_the_platform_then_defaults(
    given_: dict[str, int], patched: dict[str, int], forced: set[str]
) -> None:
    patches = [ConfigPatch(name, v, "r", name in forced) for name, v in patched.items()]
    found = apply_patches(Sizes(**given_), patches, SOURCE)
    for name in "abc":
        from_platform = name in patched and (name not in given_ or name in forced)
        expected = patched[name] if from_platform else given_.get(name, 0)
        assert getattr(found, name) == expected
    assert apply_patches(found, patches, SOURCE) == found


# The platform's hooks


class Patching(Acme):
    def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        return [block_size(128), ConfigPatch("scheduler.max_num_seqs", 8, "a small device")]

    def default_custom_ops(self, config: EngineConfig) -> Sequence[str]:
        return ["none", "+rms_norm"]

    def get_compile_backend(self, config: EngineConfig) -> str:
        return "eager"

    def check_and_update_config(self, config: EngineConfig) -> Sequence[ConfigPatch]:
        if config.scheduler.policy == "priority":
            raise SettingError("acme serves whoever comes first.")
        blocks = config.scheduler.max_num_seqs * 4
        return [ConfigPatch("cache.num_blocks", blocks, "four for each", force=True)]


def test_a_platform_fits_a_configuration() -> None:
    config = configured(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=16)), Patching())
    assert config.cache.block_size == 128
    assert config.scheduler.max_num_seqs == 16
    assert config.cache.num_blocks == 64  # of what the user gave
    assert config.compilation.custom_ops == ("none", "+rms_norm")
    assert config.compilation.backend == "eager"


def test_fitting_twice_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = configured(EngineConfig(), Patching())
    caplog.clear()
    with caplog.at_level(logging.INFO, "opweave"):
        again = configured(config, Patching())
    assert again == config
    assert origins(again) == origins(config)
    assert not caplog.messages


def test_the_users_ops_and_backend_stay() -> None:
    own = {"custom_ops": "all", "backend": "inductor"}
    config = configured(EngineConfig(compilation_config=own), Patching()).compilation
    assert (config.custom_ops, config.backend) == (("all",), "inductor")


def test_a_platform_may_refuse() -> None:
    with pytest.raises(SettingError, match="whoever comes first"):
        configured(EngineConfig(scheduler=SchedulerConfig(policy="priority")), Patching())


def test_a_dtype_that_the_platform_does_not_compute_in() -> None:
    with pytest.raises(
        UnsupportedByPlatformError, match=r"'float16' is not supported by .*'acme'.*float32"
    ):
        configured(EngineConfig(dtype="float16"), Acme())
    assert configured(EngineConfig(dtype="float32"), Acme()).dtype == "float32"


def test_a_default_cannot_be_forced() -> None:
    class Forcing(Acme):
        def config_defaults(self, config: EngineConfig) -> Sequence[ConfigPatch]:
            return [block_size(128, force=True)]

    with pytest.raises(PatchError, match=r"config_defaults forces cache\.block_size"):
        configured(EngineConfig(), Forcing())


def test_the_built_in_platforms_leave_the_defaults() -> None:
    config = EngineConfig(kernel_config=KernelConfig({"rms_norm": ["aten"]}))
    assert configured(config) is config
