"""Turning the random streams of this process (Python's and NumPy's) into JSON, and back.

Where a run goes on with more ranks than it was saved with, the ranks beyond get a stream of their own, drawn from
the saved ones: the same again at every load, and different for every rank.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np

from nearlinear.checkpoint.documents import Json


def capture() -> Json:
    """Return where Python's and NumPy's global generators stand."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    inner = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in numpy["state"].items()}
    return {"python": [version, list(words), gauss], "numpy": {**numpy, "state": inner}}


def restore(streams: Json) -> None:
    """Put Python's and NumPy's global generators where ``capture`` found them."""
    version, words, gauss = streams["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(streams["numpy"])


def reseed(seed: int) -> None:
    """Start Python's and NumPy's global generators from ``seed``, 0 to 2**63 - 1."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def derived_seed(streams: Json, rank: int) -> int:
    """Return the seed of a rank for which no stream was saved, from rank 0's.

    Args:
        streams: What rank 0 saved.
        rank: The rank without a stream of its own.

    Returns:
        0 to 2**63 - 1.
    """
    text = json.dumps([streams, rank], sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
