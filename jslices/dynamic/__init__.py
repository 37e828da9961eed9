"""Tables keyed by ids of any size: rows that come and go while training, under jit.

    from jslices import dynamic

An :class:`IdMap` says which id owns which row of a table; it is a pytree beside the
parameters. In a step, ``ids.admit(batch)`` gives new ids rows, and
:func:`jslices.checkpoint.reset_rows` begins these anew with their optimizer state.
"""

from jslices.dynamic.ids import WideIds as WideIds
from jslices.dynamic.ids import wide_ids as wide_ids
from jslices.dynamic.maps import Admitted as Admitted
from jslices.dynamic.maps import IdMap as IdMap
from jslices.dynamic.maps import id_map as id_map

__all__ = ["Admitted", "IdMap", "WideIds", "id_map", "wide_ids"]
__dir__ = __all__.copy
