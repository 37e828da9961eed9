"""What to type in place of the transformation of Optax that is running."""

import sys
import traceback

#: Optax's name -> ours, where they differ.
_OF_OPTAX = {
    "add_decayed_weights": "weight_decay= of jslices.sgd or jslices.adamw",
    "scale": "jslices.sgd or jslices.optim.scale",
    "scale_by_adam": "jslices.adam for optax.adam, jslices.adamw(rate, b1, b2, "
    'weight_decay=w, mask=mask, untouched="exact") with weight decay,',
    "scale_by_rms": "jslices.rmsprop",
    "scale_by_rss": "jslices.adagrad",
    "scale_by_schedule": "jslices.sgd or jslices.optim.scale",
    "trace": "jslices.sgd",
}


def instead_of_optax() -> str | None:
    """What to type for the innermost transformation of Optax that is running, if any."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name, is_update, _ = frame.f_code.co_qualname.partition(".<locals>.update")
        caller = frame.f_back.f_code.co_qualname if frame.f_back else ""
        if caller.startswith("partition.<locals>"):  # which is made of ``masked``
            continue
        if is_update and frame.f_globals.get("__name__", "").startswith("optax."):
            ours, scaled = sys.modules["jslices.optim"], name.removeprefix("scale_by_")
            if name in _OF_OPTAX or hasattr(ours, name):
                return f"{_OF_OPTAX.get(name, f'jslices.optim.{name}')} for optax.{name}"
            if hasattr(ours, scaled):
                return f"jslices.{scaled} for optax.{scaled} (and so on)"
            return f"jslices.from_optax(optax.{name}(...))"
    return None
