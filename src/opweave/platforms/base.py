"""What opweave asks of a device family."""

from __future__ import annotations

from collections.abc import Mapping

from opweave.config import EngineConfig


class Platform:
    """A device family: says which providers its users get by default.

    Attributes:
        name: a short name, such as ``"cpu"``.
        device_type: torch's name for its devices.
        simple_compile_backend: the backend of ``torch.compile`` for a single operation.
    """

    name: str
    device_type: str
    simple_compile_backend: str = "inductor"

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        """Return the default priority list of each op; ops left out get native.

        A platform may choose by *config*. The lists that opweave ships are the same in
        eager mode and under ``torch.compile``.
        """
        return {}
