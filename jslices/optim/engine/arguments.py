"""Types of hyperparameters: each says what its values may be.

The decorators of constructors check arguments by them (:mod:`jslices._arguments`).
"""

from typing import Annotated, TypeAlias

from jax.typing import DTypeLike

from jslices import _arguments
from jslices._arguments import Flag, Number, OneOf
from jslices._typing import Scalar, Schedule

_CLIMB = (
    "to climb, pass the gradients of the negated loss, or type "
    "jslices.optim.chain(tx, jslices.optim.scale(-1.0))"
)

#: PyTorch refuses negative rates as well; zero holds still.
LearningRate: TypeAlias = Annotated[
    Scalar | Schedule, Number(at_least=0, schedule=True, if_negative=_CLIMB)
]
#: One that is a divisor.
PositiveRate: TypeAlias = Annotated[
    Scalar | Schedule, Number(above=0, schedule=True, if_negative=_CLIMB)
]
#: What a mean keeps of itself in a step.
Decay: TypeAlias = Annotated[Scalar, Number(at_least=0, below=1)]
#: What a sum keeps of itself in a step; 1 forgets nothing.
Momentum: TypeAlias = Annotated[Scalar, Number(at_least=0, at_most=1)]
#: Weight decay, constant or scheduled.
WeightDecay: TypeAlias = Annotated[Scalar | Schedule, Number(at_least=0, schedule=True)]
NotNegative: TypeAlias = Annotated[Scalar, Number(at_least=0)]
Positive: TypeAlias = Annotated[Scalar, Number(above=0)]
NotPositive: TypeAlias = Annotated[Scalar, Number(at_most=0)]
#: Which root ``eps`` stands beside.
EpsHat: TypeAlias = Annotated[
    bool, Flag("which of the roots eps stands beside; the number is eps")
]
Whole: TypeAlias = Annotated[int, Number(integer=True)]
Count: TypeAlias = Annotated[int, Number(integer=True, at_least=0)]
PositiveCount: TypeAlias = Annotated[int, Number(integer=True, at_least=1)]
#: The dtype of a state array.
StateDtype: TypeAlias = Annotated[DTypeLike, _arguments.StateDtype()]
#: Which steps the bias correction of Adam counts.
BiasCorrection: TypeAlias = Annotated[
    str,
    OneOf(step="all steps count", row="the steps that a row was touched in count"),
]
#: What becomes of rows without gradient.
Untouched: TypeAlias = Annotated[
    str,
    OneOf(
        lazy="rows without gradient wait",
        exact="they are caught up later, as a dense optimizer moves them",
    ),
]
#: Which steps decay a row: FBGEMM's ``DECOUPLE`` and ``DECOUPLE_GLOBAL``.
DecayMode: TypeAlias = Annotated[
    str,
    OneOf(
        touched="a row decays in the steps that touch it",
        all="every row decays in every step, as it does in a dense optimizer, once it "
        "catches up",
    ),
]
