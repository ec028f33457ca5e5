"""What ``nearlinear.distribute`` does with a Keras model: look first, then hook its objects into the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.runtime.ending import install_excepthook
from nearlinear.runtime.environment import plan_asked_for, world_from
from nearlinear.runtime.local.island import apart
from nearlinear.tensorflow.data import SharedDataset
from nearlinear.tensorflow.local import Apart, require_apart
from nearlinear.tensorflow.session import current, start
from nearlinear.tensorflow.train import Training, optimizers_of

_OURS = "_nearlinear_training"


def distribute(
    model: keras.Model,
    optimizer: Any,
    loaders: Sequence[Any],
    strategy: str | Plan,
    weight: Callable[[Any], Any] | str | None,
) -> list[Any]:
    """Hook the objects into the run, in place; return them. ``nearlinear.distribute`` documents the arguments."""
    install_excepthook()
    plan = plan_asked_for(strategy) or Plan()
    far = apart(plan)
    if far and world_from().size > 1:
        raise InputError(
            "a Keras model trains apart in one process of each machine; leave out -n, and join again for every further "
            "process"
        )
    optimizers = optimizers_of(model) if optimizer is None else [optimizer]
    _require(model, optimizers, loaders, plan, weight)
    if far:
        require_apart(model, optimizers, loaders, weight, current())
    session = start()
    if events.listened_to("gradients") and session.size > 1 and plan.strategy == "pipeline":
        raise InputError(
            "nearlinear check does not see into a Keras pipeline; compare its history with one process's, or check "
            "strategy 'data'"
        )
    session.models += 1
    if weight == "sum":
        session.summed = True
    elif callable(weight):
        session.weight = weight
    if session.size > 1 and plan.strategy == "pipeline":
        from nearlinear.tensorflow.pipeline.train import distribute_pipeline

        distribute_pipeline(model, session, plan)
    elif far:
        setattr(model, _OURS, Apart(model, optimizers, session, plan, session.models))
    elif session.size > 1 or events.listened_to("gradients"):
        if plan.compress and session.size > 1:
            session.notice(f"{plan.compress} on the wire rounds gradients: the numbers are not those of one process")
        training = Training(model, optimizers, session, plan, session.models)
        setattr(model, _OURS, training)
        if not model.compiled and all(layer.built for layer in model._flatten_layers()):
            for each in optimizers:
                if not each.built:
                    each.build(model.trainable_variables)
            training.replicas.begin()
    facts = {"rank": session.rank, "world_size": session.size}
    first = optimizers[0] if optimizers else None
    what = {"front_end": "tensorflow", "model": model, "optimizer": first, "notes": [], "plan": plan}
    events.publish("distributed", **facts, **what)
    events.send_to_launcher("distributed", strategy=plan.strategy, **facts)
    returned = [SharedDataset(each, session) for each in loaders]
    return [each for each in (model, optimizer) if each is not None] + returned


def _require(model: keras.Model, optimizers: Sequence[Any], loaders: Sequence[Any], plan: Plan, weight: Any) -> None:
    """Raise if something cannot be distributed as given, before anything is changed."""
    if tf.distribute.has_strategy() or model._distribute_strategy is not None:
        raise InputError(
            "the model belongs to a tf.distribute strategy; take `with strategy.scope()` away, nearlinear replaces it"
        )
    if getattr(model, _OURS, None) is not None:
        raise InputError("this model was distributed before; call nl.distribute once, after compile")
    if plan.strategy == "sharded":
        raise InputError(
            "strategy 'sharded' is for PyTorch; Keras models train by 'data' or 'pipeline', and far apart by 'local'"
        )
    if plan.recompute:
        raise InputError("a Keras pipeline does not make activations again; leave recompute out of the plan")
    if not optimizers:
        raise InputError(
            "the model is not compiled and no optimizer was given: call model.compile(...) before nl.distribute, "
            "or nl.distribute(model, optimizer) for a loop of your own"
        )
    if any(getattr(each, "sparse", False) for each in getattr(model, "inputs", None) or ()):
        raise InputError(
            "the model has sparse inputs, whose gradients come as rows that ranks cannot join as one process has them; "
            "make them dense (keras.Input(sparse=False)), or embed their indices"
        )
    if weight is not None and weight != "sum" and not callable(weight):
        raise InputError(f"weight is {weight!r}; it must be a function of the batch, or 'sum'")
    if weight == "sum" and getattr(model, "_compile_loss", None) is not None:
        raise InputError(
            "weight='sum' with a compiled loss, which says itself whether it is a sum or a mean; leave weight out"
        )
    for loader in loaders:
        if not isinstance(loader, tf.data.Dataset):
            raise InputError(
                f"a loader is a {type(loader).__name__}; for a loop of your own hand over a tf.data.Dataset of batches"
            )
