"""IndexedSlices: some rows of an array, and what arithmetic on them means."""

from jslices._slices.entries import Facts as Facts
from jslices._slices.entries import check_slices as check_slices
from jslices._slices.opaque import opened as opened
from jslices._slices.parts import as_array as as_array
from jslices._slices.shards import each_shard as each_shard
from jslices._slices.shards import sent_to_owners as sent_to_owners
from jslices._slices.slices import IndexedSlices as IndexedSlices
from jslices._slices.slices import concat_slices as concat_slices
from jslices._slices.slices import deduplicated as deduplicated
from jslices._slices.slices import is_slices as is_slices
from jslices._slices.slices import rows_at as rows_at
from jslices._slices.slices import slices_of as slices_of
from jslices._slices.stacked import Stacked as Stacked
