"""The functions of ``tf.nn`` for tables, sampled losses and small convolutional models.

The lookups and losses are those of jslices, with TensorFlow's arguments in TensorFlow's
order; further keywords, such as ``mode``, are passed on. All accept variables. What
TensorFlow draws from a global generator is drawn here with ``key=``, a JAX key, or with
``seed=``, which draws the same classes in every call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jslices as js
from jslices._names import public
from jslices.tf1._arrays import TensorLike, operation
from jslices.tf1._instead import missing
from jslices.tf1.sparse import SparseTensor

#: A table ``[V, *D]``, an array or a variable, or a list of its shards.
Table: TypeAlias = Any
#: A SparseTensor whose rows are bags, or a form of ``jslices.embedding_lookup_sparse``.
Bags: TypeAlias = Any


@operation
def embedding_lookup(
    params: Table,
    ids: ArrayLike,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: float | None = None,
    **options: Any,
) -> jax.Array:
    """The rows ``[*B, *D]`` of a table ``[V, *D]``: :func:`jslices.embedding_lookup`.

    ``options`` are ``padding_id`` and ``mode``.
    """
    options |= {"partition_strategy": partition_strategy, "max_norm": max_norm}
    return js.embedding_lookup(params, ids, **options)


@operation
def embedding_lookup_sparse(
    params: Table,
    sp_ids: Bags,
    sp_weights: Bags | None,
    partition_strategy: str = "mod",
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    **options: Any,
) -> jax.Array:
    """One combined row ``[*D]`` for each bag: :func:`jslices.embedding_lookup_sparse`.

    ``sp_ids`` may also be a :class:`jslices.tf1.SparseTensor` whose rows are the bags, and
    ``sp_weights`` one of the same indices; ``options`` are ``mask`` and ``mode``.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [1, 3, 2], (2, 2))
      >>> tf.nn.embedding_lookup_sparse(jnp.arange(4.0), ids, None, combiner="mean")
      Array([2., 2.], dtype=float32)
    """
    bags, weights = _bags(sp_ids), _weights(sp_weights)
    options |= {"partition_strategy": partition_strategy}
    return js.embedding_lookup_sparse(params, bags, weights, combiner, max_norm, **options)


@operation
def safe_embedding_lookup_sparse(
    embedding_weights: Table,
    sparse_ids: Bags,
    sparse_weights: Bags | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: float | None = None,
    **options: Any,
) -> jax.Array:
    """The same for raw ids: :func:`jslices.safe_embedding_lookup_sparse`.

    Bags and options are those of :func:`jslices.tf1.nn.embedding_lookup_sparse`.
    """
    bags, weights = _bags(sparse_ids), _weights(sparse_weights)
    options |= {"partition_strategy": partition_strategy, "max_norm": max_norm}
    return js.safe_embedding_lookup_sparse(
        embedding_weights, bags, weights, combiner, default_id, **options
    )


def _bags(ids: Bags) -> Bags:
    """A SparseTensor in the form ``(values, segment_ids, num_segments)``."""
    if not isinstance(ids, SparseTensor):
        return ids
    indices, values, shape = jnp.asarray(ids.indices), ids.values, ids.dense_shape
    if indices.ndim != 2 or len(shape) != 2 or indices.shape[1:] != (2,):
        raise ValueError(
            "a SparseTensor of ids has indices [K, 2] and dense_shape (B, L), got indices "
            f"{list(indices.shape)} and dense_shape {tuple(shape)}"
        )
    return jnp.asarray(values), indices[:, 0], int(shape[0])


def _weights(weights: Bags | None) -> Bags | None:
    return jnp.asarray(weights.values) if isinstance(weights, SparseTensor) else weights


# --- sampled losses ---------------------------------------------------------------------


def _sampled_loss(
    function: Callable[..., jax.Array], meaning: str, hits_are_removed: bool
) -> Callable[..., jax.Array]:
    """A sampled loss of jslices with TensorFlow's arguments."""
    what = function.__name__

    def loss(
        weights: Table,
        biases: Table,
        labels: ArrayLike,
        inputs: ArrayLike,
        num_sampled: int,
        num_classes: int,
        num_true: int = 1,
        sampled_values: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        remove_accidental_hits: bool = hits_are_removed,
        partition_strategy: str = "mod",
        name: str | None = None,
        seed: int | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        args = weights, biases, labels, inputs, num_sampled, num_classes, num_true
        options = sampled_values, remove_accidental_hits, partition_strategy
        return function(*args, *options, key=_key(key, seed))

    loss.__name__ = loss.__qualname__ = what
    loss.__doc__ = f"""{meaning}: :func:`jslices.{what}`.

    Without ``sampled_values`` classes are drawn here, with ``seed`` or a JAX ``key``.
    """
    return operation(loss)


sampled_softmax_loss = _sampled_loss(
    js.sampled_softmax_loss, "Softmax cross entropy over some classes", True
)
nce_loss = _sampled_loss(js.nce_loss, "Noise-contrastive estimation", False)


@operation
def log_uniform_candidate_sampler(
    true_classes: ArrayLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
    name: str | None = None,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw classes, low numbers more often: :func:`jslices.log_uniform_candidate_sampler`.

    ``true_classes`` are ``[B, num_true]``, and ``seed`` or ``key`` is needed.
    """
    classes = jnp.asarray(true_classes)
    if classes.ndim != 2 or classes.shape[1] != num_true:
        raise ValueError(
            f"log_uniform_candidate_sampler wants true_classes [B, num_true={num_true}]"
            f", got shape {list(classes.shape)}"
        )
    chosen = _key(key, seed)
    if chosen is None:
        raise ValueError(
            "log_uniform_candidate_sampler draws classes and got no key; pass "
            "key=jax.random.key(0), or seed= for the same classes in every call"
        )
    return js.log_uniform_candidate_sampler(
        classes, num_sampled, range_max, key=chosen, unique=unique
    )


def _key(key: jax.Array | None, seed: int | None) -> jax.Array | None:
    return jax.random.key(seed) if key is None and seed is not None else key


# --- layers -----------------------------------------------------------------------------

_FORMATS = ("NHWC", "NCHW")


@operation
def conv2d(
    input: TensorLike,
    filter: TensorLike,
    strides: Sequence[int],
    padding: str,
    data_format: str = "NHWC",
    name: str | None = None,
) -> jax.Array:
    """A convolution with TensorFlow's arguments, by ``jax.lax.conv_general_dilated``.

    Args:
      input: images ``[batch, height, width, channels]``.
      filter: ``[height, width, channels, out channels]``, of the same dtype.
      strides: four integers, those of batch and channels being 1.
      padding: ``"SAME"``, which divides height and width by the stride, or ``"VALID"``.
      data_format: ``"NCHW"`` for images and strides in that order.
      name: a name scope for the profile.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> images, filter = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
      >>> tf.nn.conv2d(images, filter, strides=[1, 2, 2, 1], padding="VALID").ravel()
      Array([9., 9.], dtype=float32)
    """
    if data_format not in _FORMATS:
        raise ValueError(
            f"conv2d: data_format must be one of {_FORMATS}, not {data_format!r}"
        )
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"conv2d: padding must be 'SAME' or 'VALID', not {padding!r}")
    steps = dict(zip(data_format, strides, strict=False))
    if len(strides) != 4 or steps["N"] != 1 or steps["C"] != 1:
        raise ValueError(
            f"conv2d: strides must be four integers in the order {data_format}, those of N "
            f"and C being 1, not {strides!r}"
        )
    images, window = jnp.asarray(input), (steps["H"], steps["W"])
    formats = data_format, "HWIO", data_format
    return jax.lax.conv_general_dilated(
        images, jnp.asarray(filter), window, padding, dimension_numbers=formats
    )


@operation
def relu(features: TensorLike, name: str | None = None) -> jax.Array:
    """``max(features, 0)`` by ``jax.nn.relu``, in the shape and dtype of ``features``."""
    return jax.nn.relu(features)


__all__, __dir__ = public(__name__)


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name)
