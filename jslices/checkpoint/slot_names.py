"""Names of slots: what PyTorch and TensorFlow call the state arrays of optimizers."""

from jslices import optim

LIBRARIES = ("torch", "tf1", "tf2", "keras")

#: For each state the slots with the same meaning: in PyTorch, in TensorFlow 1, in
#: TensorFlow 2 up to Keras 2, and in Keras 3; None where there is none.
NAMES: dict[type, dict[str, tuple[str | None, ...]]] = {
    optim.AdamState: {
        "mu": ("exp_avg", "Adam", "m", "momentum"),
        "nu": ("exp_avg_sq", "Adam_1", "v", "velocity"),
    },
    optim.AdagradState: {
        "sum_of_squares": ("sum", "Adagrad", "accumulator", "accumulator")
    },
    optim.SgdState: {"trace": ("momentum_buffer", "Momentum", None, None)},
    optim.RmspropState: {
        "nu": ("square_avg", "RMSProp", "rms", "velocity"),
        "mu": ("grad_avg", "RMSProp_1", "mg", "average_gradient"),  # if centered
    },
    optim.AdadeltaState: {
        "e_g": ("square_avg", "Adadelta", "accum_grad", "accumulated_grad"),
        "e_x": ("acc_delta", "Adadelta_1", "accum_var", "accumulated_delta_var"),
    },
    optim.FtrlState: {
        "accum": (None, "Ftrl", "accumulator", "accumulator"),
        "linear": (None, "Ftrl_1", "linear", "linear"),
    },
    optim.LionState: {"mu": (None, None, None, "momentum")},
    optim.AdafactorState: {},
    optim.AmsgradState: {},
    optim.LambState: {},
    optim.PartialRowwiseAdamState: {},
    optim.ProximalAdagradState: {},
    optim.RowwiseAdagradState: {},
}

_FIRST, _SECOND = ("momentum1", "momentum_1"), ("momentum2", "momentum_2")
_MOMENTS = {"mu": (*_FIRST, "exp_avg"), "nu": (*_SECOND, "exp_avg_sq")}
#: What FBGEMM and TorchRec call them as well, in their modules and by PyTorch's names.
FUSED: dict[type, dict[str, tuple[str, ...]]] = {
    optim.AdagradState: {"sum_of_squares": _FIRST},
    optim.AdamState: {**_MOMENTS, "row_counts": ("row_counter",)},
    optim.LambState: {**_MOMENTS},
    optim.PartialRowwiseAdamState: {**_MOMENTS},
    optim.RowwiseAdagradState: {"sum_of_squares": (*_FIRST, "sum")},
}

#: State arrays of squares, which are never negative.
SQUARES = ("nu", "sum_of_squares", "e_g", "e_x", "accum", "nu_max", "v", "v_row", "v_col")

#: Slots that mean something else than the array they resemble, and what to do.
OTHERWISE: dict[type, dict[str, str]] = {
    optim.AmsgradState: {
        name: "of AMSGrad here the largest mean of squares is that of the corrected ones, "
        "elsewhere of the uncorrected: start anew, or go on with jslices.adam"
        for name in ("max_exp_avg_sq", "vhat", "velocity_hat")
    },
    optim.SgdState: {
        "momentum": 'it is -learning_rate * trace: pass "trace": -x / learning_rate'
    },
    optim.RmspropState: {
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
