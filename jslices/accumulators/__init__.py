"""Gradients of many workers, summed up until enough have arrived.

``SparseConditionalAccumulator`` and ``ConditionalAccumulator`` are objects that threads
share and ``serve`` gives to other processes (over gRPC, the extra ``serve``);
``sparse_accumulator`` and ``dense_accumulator`` are pure functions on a state, for use
under ``jit``.
"""

from jslices._names import public as _public
from jslices.accumulators.blocking import ConditionalAccumulator as ConditionalAccumulator
from jslices.accumulators.blocking import (
    ConditionalAccumulatorBase as ConditionalAccumulatorBase,
)
from jslices.accumulators.blocking import (
    SparseConditionalAccumulator as SparseConditionalAccumulator,
)
from jslices.accumulators.pure import DenseAccumulator as DenseAccumulator
from jslices.accumulators.pure import DenseAccumulatorState as DenseAccumulatorState
from jslices.accumulators.pure import SparseAccumulator as SparseAccumulator
from jslices.accumulators.pure import SparseAccumulatorState as SparseAccumulatorState
from jslices.accumulators.pure import dense_accumulator as dense_accumulator
from jslices.accumulators.pure import sparse_accumulator as sparse_accumulator
from jslices.accumulators.server import AccumulatorClient as AccumulatorClient
from jslices.accumulators.server import AccumulatorServer as AccumulatorServer
from jslices.accumulators.server import connect as connect
from jslices.accumulators.server import serve as serve
from jslices.errors import CancelledError as CancelledError
from jslices.errors import DeadlineExceededError as DeadlineExceededError
from jslices.errors import InvalidArgumentError as InvalidArgumentError
from jslices.errors import UnavailableError as UnavailableError

__all__, __dir__ = _public(__name__)
