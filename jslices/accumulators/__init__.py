"""Gradients of many workers, summed up until enough have come.

``SparseConditionalAccumulator`` and ``ConditionalAccumulator`` are objects that threads
share and ``serve`` gives to other processes; ``sparse_accumulator`` and
``dense_accumulator`` are pure functions on a state, for use under ``jit``.
"""

from jslices._errors import CancelledError as CancelledError
from jslices._errors import DeadlineExceededError as DeadlineExceededError
from jslices._errors import InvalidArgumentError as InvalidArgumentError
from jslices._errors import UnavailableError as UnavailableError
from jslices.accumulators.blocking import (
    SparseConditionalAccumulator as SparseConditionalAccumulator,
)
from jslices.accumulators.dense import ConditionalAccumulator as ConditionalAccumulator
