"""Registration sites in the form of a stack trace."""

from __future__ import annotations

import traceback

from opweave.base.site import Site


def registration_stack(site: Site) -> list[str]:
    r"""Return the place of a registration as :func:`traceback.format_stack` writes its last frame.

    >>> registration_stack(Site("nowhere.py", 3))
    ['  File "nowhere.py", line 3, in <registration>\n']
    """
    return traceback.format_list([traceback.FrameSummary(site.file, site.line, "<registration>")])
