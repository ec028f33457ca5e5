"""The Keras 3 front end, on TensorFlow: it hooks a model and its optimizers into the run."""

from nearlinear.tensorflow.distribute import distribute
from nearlinear.tensorflow.session import current as session

__all__ = ["distribute", "session"]
