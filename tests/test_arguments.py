"""What is no hyperparameter is refused by name, in every optimizer and transformation."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jslices as js

NO_NUMBERS = ["0.1", None, True, [0.1], jnp.ones(2), 1j, jnp.array(True), float, object()]
NO_RATES = [*NO_NUMBERS, math.nan, math.inf, -1.0, np.float32(-1), jnp.array(-1.0)]
NO_STRENGTHS = [*NO_NUMBERS, lambda step: 0.1, math.nan, math.inf, -1e-3]
NO_DECAYS = [*NO_STRENGTHS, 1.0, 2]
NO_FLAGS = ["no", None, 0.9, 1, jnp.ones(3)]
NO_DTYPES = [int, bool, "x", jnp.ones(2), "int8", "float8_e4m3fn", 0.5]
NO_OPTIONS = ["x", None, 0.5, jnp.ones(3), np.array(["lazy"]), object()]
NO_COUNTS = [*NO_OPTIONS, 1.5, True]

#: What each argument may not be. None is fine where it is the default.
WRONG = {
    argument: values
    for arguments, values in [
        ("learning_rate weight_decay weight_decay_rate", NO_RATES),
        ("b1 b2 decay rho", NO_DECAYS),
        ("momentum", [*NO_STRENGTHS, 1.5]),
        ("eps eps_root initial_scale initial_accumulator_value beta", NO_STRENGTHS),
        ("l1_regularization_strength l2_regularization_strength", NO_STRENGTHS),
        ("l2_shrinkage_regularization_strength decay_rate", NO_STRENGTHS),
        ("noise_multiplier", NO_STRENGTHS),
        ("l2_norm_clip expected_batch_size", [*NO_STRENGTHS, 0.0]),
        ("key", [7, "seed", None]),
        ("learning_rate_power", [*NO_NUMBERS, 0.5, math.nan]),
        ("clipping_threshold", [x for x in NO_STRENGTHS if x is not None]),
        ("mu_dtype accumulator_dtype dtype_momentum", NO_DTYPES),
        ("dtype", [*NO_DTYPES, None, complex]),
        ("untouched weight_decay_mode combine", NO_OPTIONS),
        ("min_dim_size_to_factor every_k_schedule", [*NO_COUNTS, -1]),
        ("decay_offset", NO_COUNTS),
        ("nesterov centered eps_in_sqrt factored eps_hat use_grad_mean", NO_FLAGS),
        ("bias_correction bias_correction_mu bias_correction_nu", NO_FLAGS),
        ("multiply_by_parameter_scale mask_compatible_extra_args", NO_FLAGS),
        ("max_norm max_delta threshold", [*NO_NUMBERS, -1.0, math.nan]),
        ("factors", ["2", object(), 1j, jnp.ones(2)]),
        ("frozen", ["2", object(), 1j, jnp.ones(2), jnp.ones(3, bool)]),
        ("tx transformations inner opt", [0.1, "adam", jnp.ones(2)]),
        ("transforms", [{"table": 0.1}, {"table": "adam"}, [js.sgd(0.1)], None]),
    ]
    for argument in arguments.split()
}
#: Trees, which are checked where they meet the parameters.
TREES = ("mask", "weight_decay_mask", "param_labels", "grads")
#: Arguments that are the only one of their function.
SAID = ("factors", "frozen")
#: What functions need besides.
TABLE = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (4, 2))
NEEDED = {
    "learning_rate": 0.1,
    **dict.fromkeys(("tx", "inner", "opt"), js.sgd(0.1)),
    **{"transforms": {"table": js.sgd(0.1)}, "param_labels": "table", "mask": True},
    **{"every_k_schedule": 2, "grads": TABLE},
    **{"dtype": "float32", "frozen": jnp.ones(4, bool), "key": jax.random.key(0)},
    **{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 8},
}
MAKERS = {
    name: make
    for name, make in vars(js.optim).items()
    if inspect.isfunction(make) and hasattr(make, "__wrapped__") and name != "apply_updates"
}


def refused(make, argument, value):
    """The message for one wrong argument."""
    parameters = inspect.signature(make).parameters
    needed = {
        name: NEEDED[name]
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name in NEEDED
    }
    with pytest.raises((TypeError, ValueError)) as error:
        tx = (
            make(value)
            if argument == "transformations"
            else make(**{**needed, argument: value})
        )
        tx.init(jnp.ones((4, 2)))  # where frozen rows are counted
    return str(error.value)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_what_is_no_hyperparameter_is_refused(name):
    make = MAKERS[name]
    for argument, parameter in inspect.signature(make).parameters.items():
        if argument not in TREES:
            for value in WRONG[argument]:
                if value is not None or parameter.default is not None:
                    text = refused(make, argument, value)
                    named = argument in text or re.search("wants .*transformation", text)
                    assert name in text and (named or argument in SAID), (value, text)


def test_what_users_pass_is_taken():
    for rate in (0, 0.0, 1, np.float64(0.1), jnp.float32(0.1), jnp.bfloat16(0.1)):
        js.sgd(rate)
    js.adam(optax.constant_schedule(0.1), 0.0, 0, 0, 0, jnp.bfloat16)
    js.adam(0.1, mu_dtype=complex)
    js.sgd(0.1, momentum=1.0, nesterov=np.bool_(True))
    js.optim.clip(math.inf)
    climb = js.optim.chain(js.sgd(0.5), js.optim.scale(-1.0))
    assert climb.apply(jnp.ones(2), climb.init(jnp.ones(2)), jnp.ones(2))[0][0] == 1.5
    traced = jax.jit(lambda rate, b1: js.adam(rate, b1).init(jnp.ones(3)).count)
    assert traced(-1.0, 2.0) == 0  # values of the program are its own
    with pytest.raises(ValueError, match=r"-1\): .*negated loss, or type .*scale\(-1.0\)"):
        js.adam(-1)
    with pytest.raises(TypeError, match=r"for one that changes: optax.inject_hyperparams"):
        js.adam(0.1, b1=lambda step: 0.9)
    with pytest.raises(TypeError, match=r"adam: missing .*; it takes learning_rate, b1, "):
        js.adam(lr=0.1)


def test_schedules_return_one_number():
    table, wrong = jnp.ones((4, 3)), (jnp.ones(3), "0.1", None, 1j, True)
    for name in ("sgd", "adam", "ftrl", "adafactor"):
        for value in wrong:
            tx = getattr(js, name)(lambda step, value=value: value)
            with pytest.raises(TypeError, match=r"schedule .* returned .*: wanted one"):
                tx.update(table, tx.init(table), table)
    decay = js.adamw(0.1, weight_decay=lambda step: jnp.ones(3))
    with pytest.raises(TypeError, match=r"schedule .* returned float32\[3\]"):
        decay.update(table, decay.init(table), table)


# --- What is no array -------------------------------------------------------------------

TX = js.adam(0.1)
PARAMS = {"table": jnp.ones((4, 2)), "w": jnp.ones(2)}
GRADS = {"table": TABLE, "w": jnp.ones(2)}
STATE = TX.init(PARAMS)


@pytest.mark.parametrize("value", ["abc", object(), np.array(["abc"]), b"abc"], ids=type)
def test_what_is_no_array_is_refused(value):
    wrong = {**GRADS, "w": value}
    for call in (
        lambda: TX.init({**PARAMS, "w": value}),
        lambda: TX.update(wrong, STATE, PARAMS),
        lambda: TX.apply(wrong, STATE, PARAMS),
        lambda: js.apply_updates(PARAMS, wrong),
        lambda: js.global_norm(wrong),
        lambda: js.clip_by_global_norm(wrong, 1.0),
        lambda: js.optim.clip(1.0).update(wrong, ()),
        lambda: js.clip_by_norm(value, 1.0),
        lambda: js.clip_rows_by_norm(value, 1.0),
        lambda: js.clip_by_value(value, -1, 1),
        lambda: js.clip_by_value(PARAMS["w"], value, 1),
        lambda: js.accumulate_gradients(lambda x: x, {"w": value}),
        lambda: js.sum_stacked(wrong),
        lambda: js.mask_rows(value, jnp.ones(4, bool)),
        lambda: js.project_rows(value, TABLE, 1.0),
    ):
        with pytest.raises(TypeError, match=r"(wanted|wants) .*(array|arrays)"):
            call()


def test_floats_of_8_bits_are_refused():
    tiny = jnp.ones((4, 2), "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"parameter at \['t'\] is float8.* bfloat16"):
        TX.init({"t": tiny})
    for tx in (js.sgd(0.1), js.from_optax(optax.sgd(0.1))):
        with pytest.raises(TypeError, match=r"gradient is float8.*HostTable\(..., stored="):
            tx.apply(TABLE.astype("float8_e4m3fn"), tx.init(jnp.ones((4, 2))), tiny)


def test_masks_of_weight_decay_are_bools():
    for mask in ("t", {"table": jnp.ones(4, bool), "w": False}, {"table": None, "w": True}):
        with pytest.raises(TypeError, match="mask of the weight decay must be bools"):
            js.adamw(0.1, mask=mask).init(PARAMS)
    for mask in ({"table": True}, lambda params: [True, False]):
        with pytest.raises(ValueError, match=r"must be bools .* a prefix of it; pytree"):
            js.lion(0.1, mask=mask).init(PARAMS)


def test_slices_as_parameters_are_refused():
    for call in (
        lambda: TX.apply(PARAMS, STATE, GRADS),  # in another order
        lambda: TX.update(PARAMS, STATE, GRADS),
        lambda: js.apply_updates(GRADS, PARAMS),
        lambda: js.from_optax(optax.sgd(0.1)).apply(
            PARAMS, optax.sgd(0.1).init(1.0), GRADS
        ),
    ):
        with pytest.raises(TypeError, match=r"parameter.* IndexedSlices\(.*, as gradients"):
            call()


def test_none_for_all_gradients_is_refused():
    for call in ("update", "apply"):
        with pytest.raises(TypeError, match=f"tx.{call} got None for all gradients"):
            getattr(TX, call)(None, STATE, PARAMS)
    assert TX.apply(None, TX.init(None), None)[0] is None  # a part without parameters


def test_integers_that_no_step_moves_are_refused():
    params = {"table": jnp.ones((4, 2)), "n": jnp.arange(3)}
    state = TX.init(params)
    for tx in (TX, js.from_optax(optax.sgd(0.1))):
        grads = {"table": TABLE, "n": jnp.ones(3)}
        with pytest.raises(TypeError, match=r"update at \['n'\] is float32, and .* int32"):
            tx.apply(grads, tx.init(params), params)
    # As jax.grad and js.grad(allow_int=True) have them.
    for nothing in (np.zeros(3, jax.dtypes.float0), None):
        new, _ = TX.apply({"table": TABLE, "n": nothing}, state, params)
        assert new["n"].tolist() == [0, 1, 2] and new["table"][0, 0] < 1
    with pytest.raises(TypeError, match="update is complex64, and the parameter float32"):
        js.apply_updates(jnp.ones(2), jnp.ones(2, complex))
    assert js.apply_updates(jnp.arange(2), jnp.ones(2, int)).tolist() == [1, 2]
