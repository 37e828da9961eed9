"""Optimizers that read and write only the rows that got a gradient.

Each optimizer is one file: a state and a *rule*, the arithmetic of one step on whatever
array it is given. ``transformation`` makes the optimizer of a rule: whole arrays for dense
gradients, the touched rows for IndexedSlices, by a plan that ``tx.plan(grads, params)``
shows. To add one, copy the file of its nearest relative. Gradient transformations and
wrappers are in ``transforms``.

``updates, state = tx.update(grads, state, params)`` and ``jslices.apply_updates`` are a
step; ``params, state = tx.apply(grads, state, params)`` is the same step in one call.

A dense optimizer also moves rows that got no gradient, by their momentum or their weight
decay. ``untouched="lazy"`` leaves them alone, as TensorFlow's ``LazyAdam`` and PyTorch's
``SparseAdam`` do. ``untouched="exact"`` gives what the dense optimizer would, at a cost
that does not depend on V: a row remembers its last step, and catches up before it is
read::

    step = js.train_step(loss, tx)
    params, state, value = step(params, state, ids, labels)
    value = js.eval_step(loss, tx)(params, state, ids, labels)
    params, state = tx.flush(params, state)  # before saving

``js.train_step`` serves lazy optimizers too. By hand, the gradient is taken at
``tx.now(params, state)``; or ``params, state = tx.catch_up(params, state, ids)`` comes
before it: ``ids`` mirror ``params``, and hold every row that gets a gradient in this step.
An update of a row that has not caught up
raises a ValueError that names the row, and under ``jit`` makes its parameters
NaN, so that the loss shows it; a process that traces such steps and never catches up is
warned. Hyperparameters other than the learning rate must be numbers known while tracing;
where the learning rate is a number that changes (by ``optax.inject_hyperparams``, say),
missed steps use the newest; a schedule is followed step by step. Optax's combinators return
no ``catch_up``: use those of ``jslices.optim`` (``chain``, ``partition``, ``masked``), or
call the optimizer's own with its part of their state.
``jax.jit(tx.flush, donate_argnums=(0, 1))`` flushes in place, also tables that are sharded
over devices: each device steps its own rows.
"""

from typing import Any as _Any

from jslices._names import no_such_name as _no_such_name
from jslices._names import public as _public
from jslices._typing import Schedule as Schedule
from jslices.optim.adadelta import AdadeltaState as AdadeltaState
from jslices.optim.adadelta import adadelta as adadelta
from jslices.optim.adafactor import AdafactorState as AdafactorState
from jslices.optim.adafactor import adafactor as adafactor
from jslices.optim.adagrad import AdagradState as AdagradState
from jslices.optim.adagrad import adagrad as adagrad
from jslices.optim.adam import AdamState as AdamState
from jslices.optim.adam import adam as adam
from jslices.optim.adamw import adamw as adamw
from jslices.optim.amsgrad import AmsgradState as AmsgradState
from jslices.optim.amsgrad import amsgrad as amsgrad
from jslices.optim.dp_sgd import DpSgdState as DpSgdState
from jslices.optim.dp_sgd import dp_sgd as dp_sgd
from jslices.optim.engine.protocol import GradientTransformation as GradientTransformation
from jslices.optim.engine.protocol import apply_updates as apply_updates
from jslices.optim.engine.step import Plan as Plan
from jslices.optim.ftrl import FtrlState as FtrlState
from jslices.optim.ftrl import ftrl as ftrl
from jslices.optim.lamb import LambState as LambState
from jslices.optim.lamb import lamb as lamb
from jslices.optim.lion import LionState as LionState
from jslices.optim.lion import lion as lion
from jslices.optim.partial_rowwise_adam import (
    PartialRowwiseAdamState as PartialRowwiseAdamState,
)
from jslices.optim.partial_rowwise_adam import partial_rowwise_adam as partial_rowwise_adam
from jslices.optim.proximal_adagrad import ProximalAdagradState as ProximalAdagradState
from jslices.optim.proximal_adagrad import proximal_adagrad as proximal_adagrad
from jslices.optim.rmsprop import RmspropState as RmspropState
from jslices.optim.rmsprop import rmsprop as rmsprop
from jslices.optim.rowwise_adagrad import RowwiseAdagradState as RowwiseAdagradState
from jslices.optim.rowwise_adagrad import rowwise_adagrad as rowwise_adagrad
from jslices.optim.sgd import SgdState as SgdState
from jslices.optim.sgd import sgd as sgd
from jslices.optim.transforms.chain import chain as chain
from jslices.optim.transforms.clip_links import clip as clip
from jslices.optim.transforms.clip_links import clip_by_block_rms as clip_by_block_rms
from jslices.optim.transforms.clip_links import clip_by_global_norm as clip_by_global_norm
from jslices.optim.transforms.clip_links import clip_rows_by_norm as clip_rows_by_norm
from jslices.optim.transforms.freeze import freeze_rows as freeze_rows
from jslices.optim.transforms.from_optax import from_optax as from_optax
from jslices.optim.transforms.multi_steps import MultiStepsState as MultiStepsState
from jslices.optim.transforms.multi_steps import multi_steps as multi_steps
from jslices.optim.transforms.params_ema import params_ema as params_ema
from jslices.optim.transforms.partition import MaskedNode as MaskedNode
from jslices.optim.transforms.partition import MaskedState as MaskedState
from jslices.optim.transforms.partition import PartitionState as PartitionState
from jslices.optim.transforms.partition import masked as masked
from jslices.optim.transforms.partition import partition as partition
from jslices.optim.transforms.rows import combine_duplicates as combine_duplicates
from jslices.optim.transforms.scale import scale as scale
from jslices.optim.transforms.state_dtype import with_state_dtype as with_state_dtype

__all__, __dir__ = _public(__name__)


def __getattr__(name: str) -> _Any:
    _no_such_name(__name__, name)
