"""Adapts a configuration to the platform, and records each change with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.base.owner import Owner
from opweave.config import EngineConfig
from opweave.config.patches import ConfigPatch, PatchError, apply_patches
from opweave.platforms.base import Platform
from opweave.platforms.errors import UnsupportedByPlatformError
from opweave.platforms.resolution import resolution
from opweave.plugins import hook

_OPS, _BACKEND = "compilation_config.custom_ops", "compilation_config.backend"


def configured(config: EngineConfig, platform: Platform | None = None) -> EngineConfig:
    """Return *config* with the platform's patches; user settings stay unless a patch has force.

    Applies the platform's defaults for values, the compile backend and ``CustomOp`` ops, then the
    changes of its ``check_and_update_config``. Idempotent. The source of each value is its
    :meth:`~opweave.config.origin.Config.origin`.

    Args:
        config: the configuration.
        platform: by default the current one.

    Raises:
        PatchError: the platform returned an invalid patch.
        UnsupportedByPlatformError: it does not support ``config.dtype``.
        SettingError: it returned a malformed value.
        OpweaveError: it cannot run *config*.
    """
    platform = platform or resolution().platform
    source = f"platform {platform.name}"
    _check_dtype(config, platform)
    for stage in (_defaults, _backend, _custom_ops, _checked):
        config = apply_patches(config, stage(config, platform), source)
    return config


def _check_dtype(config: EngineConfig, platform: Platform) -> None:
    known = [str(dtype).removeprefix("torch.") for dtype in platform.supported_dtypes]
    if config.dtype not in ("auto", *known):
        raise UnsupportedByPlatformError(
            f"dtype={config.dtype!r} is not supported by platform {platform.name!r}; choose one of "
            f"{', '.join(known)}."
        )


def _defaults(config: EngineConfig, platform: Platform) -> Sequence[ConfigPatch]:
    with hook(_owner(platform), "config_defaults"):
        patches = list(platform.config_defaults(config))
    for patch in patches:
        if isinstance(patch, ConfigPatch) and patch.force:
            raise PatchError(
                f"platform {platform.name}: config_defaults forces {patch.path}. Defaults must not "
                "override the user; return the patch from check_and_update_config."
            )
    return patches


def _custom_ops(config: EngineConfig, platform: Platform) -> Sequence[ConfigPatch]:
    with hook(_owner(platform), "default_custom_ops"):
        wanted = list(platform.default_custom_ops(config))
    if not wanted or config.compilation.origin("custom_ops").by_user:
        return ()
    typed = config.compilation.updated({"custom_ops": wanted}, f"platform {platform.name}")
    return [ConfigPatch(_OPS, typed.custom_ops, "the platform's ops")]


def _backend(config: EngineConfig, platform: Platform) -> Sequence[ConfigPatch]:
    with hook(_owner(platform), "get_compile_backend"):
        wanted = platform.get_compile_backend(config)
    if config.compilation.origin("backend").by_user:
        return ()
    return [ConfigPatch(_BACKEND, wanted, "the platform's compiler")]


def _checked(config: EngineConfig, platform: Platform) -> Sequence[ConfigPatch]:
    with hook(_owner(platform), "check_and_update_config"):
        return list(platform.check_and_update_config(config))


def _owner(platform: Platform) -> Owner | None:
    found = resolution()
    return found.owner if found.platform is platform else None
