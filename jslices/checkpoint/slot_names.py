"""Names of slots: what PyTorch and TensorFlow call the state arrays of optimizers."""

from jslices.optim import (
    AdadeltaState,
    AdafactorState,
    AdagradState,
    AdamState,
    AmsgradState,
    FtrlState,
    LambState,
    LionState,
    PartialRowwiseAdamState,
    ProximalAdagradState,
    RmspropState,
    RowwiseAdagradState,
    SgdState,
)

LIBRARIES = ("torch", "tf1", "tf2", "keras")

#: For each state the slots with the same meaning: in PyTorch, in TensorFlow 1, in
#: TensorFlow 2 up to Keras 2, and in Keras 3; None where there is none.
NAMES: dict[type, dict[str, tuple[str | None, ...]]] = {
    AdamState: {
        "mu": ("exp_avg", "Adam", "m", "momentum"),
        "nu": ("exp_avg_sq", "Adam_1", "v", "velocity"),
    },
    AdagradState: {"sum_of_squares": ("sum", "Adagrad", "accumulator", "accumulator")},
    SgdState: {"trace": ("momentum_buffer", "Momentum", None, None)},
    RmspropState: {
        "nu": ("square_avg", "RMSProp", "rms", "velocity"),
        "mu": ("grad_avg", "RMSProp_1", "mg", "average_gradient"),  # if centered
    },
    AdadeltaState: {
        "e_g": ("square_avg", "Adadelta", "accum_grad", "accumulated_grad"),
        "e_x": ("acc_delta", "Adadelta_1", "accum_var", "accumulated_delta_var"),
    },
    FtrlState: {
        "accum": (None, "Ftrl", "accumulator", "accumulator"),
        "linear": (None, "Ftrl_1", "linear", "linear"),
    },
    LionState: {"mu": (None, None, None, "momentum")},
    AdafactorState: {},
    AmsgradState: {},
    LambState: {},
    PartialRowwiseAdamState: {},
    ProximalAdagradState: {},
    RowwiseAdagradState: {},
}

#: State arrays of squares, which are never negative.
SQUARES = ("nu", "sum_of_squares", "e_g", "e_x", "accum", "nu_max", "v", "v_row", "v_col")

#: Slots that mean something else than the array they resemble, and what to do.
OTHERWISE: dict[type, dict[str, str]] = {
    AmsgradState: {
        name: "of AMSGrad here the largest mean of squares is that of the corrected ones, "
        "elsewhere of the uncorrected: start anew, or go on with jslices.adam"
        for name in ("max_exp_avg_sq", "vhat", "velocity_hat")
    },
    SgdState: {
        "momentum": 'it is -learning_rate * trace: pass "trace": -x / learning_rate'
    },
    RmspropState: {
        "momentum_buffer": 'with momentum= pass "trace": -learning_rate * x, '
        "else leave it out",
        "momentum": 'with momentum= pass "trace": -x, else leave it out',
        "RMSProp_1": "beside an RMSProp_2 it is the mean gradient: type centered=True; "
        'else the momentum: with momentum= pass "trace": -x, else leave it out',
        "RMSProp_2": "it is the momentum of a centered optimizer: with centered=True and "
        'momentum= pass "trace": -x, else leave it out',
    }
    | dict.fromkeys(
        ("grad_avg", "mg", "average_gradient"),
        "it is the mean gradient of a centered optimizer: type centered=True",
    ),
}
