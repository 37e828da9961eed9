"""Many tables of one row shape in one array: one lookup, one sort, one step for all.

A model that looks up 26 arrays has to compile 26 lookups, sorts and steps.
:func:`stack_tables` puts the tables of any model in one array for each row shape, and gives
the function back that its loss calls; :class:`StackedTables` is such an array, for models
that are written for it. Import them by themselves::

    from jslices.tables import stack_tables
"""

from jslices._names import public as _public
from jslices._slices import Stacked as Stacked
from jslices.tables.arrays import StackedTables as StackedTables
from jslices.tables.trees import Unstack as Unstack
from jslices.tables.trees import stack_tables as stack_tables

__all__, __dir__ = _public(__name__)
