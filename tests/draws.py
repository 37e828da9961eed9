"""How many examples random tests draw: few, and more in the slow step of ``.ci/run``."""

import os

from hypothesis import settings

#: Of the slow step.
USUAL = 20
#: Random programs a run; JSLICES_PROGRAMS=1000 python -m pytest -m fuzz looks for longer.
PROGRAMS = int(os.environ.get("JSLICES_PROGRAMS", USUAL // 4))


def examples(count):
    """So many where there are the usual programs, and in proportion where there are not."""
    return settings(max_examples=max(1, count * PROGRAMS // USUAL))
