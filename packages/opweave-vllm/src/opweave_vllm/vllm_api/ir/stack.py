"""Registration sites in the form of a stack trace."""

from __future__ import annotations

import traceback

from opweave.registration import Site


def registration_stack(site: Site) -> list[str]:
    r"""Return the site of a registration in the format of :func:`traceback.format_stack`.

    >>> registration_stack(Site("nowhere.py", 3))
    ['  File "nowhere.py", line 3, in <registration>\n']
    """
    return traceback.format_list([traceback.FrameSummary(site.file, site.line, "<registration>")])
