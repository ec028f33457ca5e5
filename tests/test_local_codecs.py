"""Updates as bytes: what each codec keeps, how long it is, and that nothing is lost for good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nearlinear.errors import InputError
from nearlinear.runtime.local.codecs import BLOCK, CODECS, SPARSE, Feedback, Floats, Undecodable, decode, encode, nbytes

LARGEST = float(np.float32(1e30))
finite = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)
vectors = hnp.arrays(np.float32, st.integers(0, 3 * BLOCK + 5), elements=finite)


@pytest.mark.parametrize("codec", CODECS)
@given(values=vectors)
@settings(max_examples=60, deadline=None)
def test_a_vector_comes_back_with_its_length_and_without_infinities(codec: str, values: Floats) -> None:
    data = encode(codec, values)
    assert data.dtype == np.uint8 and len(data) == nbytes(codec, len(values))
    back = decode(codec, data.tobytes(), len(values))
    assert back.dtype == np.float32 and back.shape == values.shape and np.isfinite(back).all()


@given(values=vectors)
@settings(max_examples=60, deadline=None)
def test_fp32_changes_no_bit_and_bf16_at_most_the_ninth_of_the_mantissa(values: Floats) -> None:
    assert decode("fp32", encode("fp32", values), len(values)).tobytes() == values.tobytes()
    # Below the smallest normal float bf16 has an absolute step of 2^-133.
    error = np.abs(decode("bf16", encode("bf16", values), len(values)) - values)
    assert (error <= np.abs(values) * 2.0**-8 + 2.0**-133).all()


@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
@given(values=vectors)
@settings(max_examples=60, deadline=None)
def test_a_quantised_value_is_off_by_half_a_step_of_its_block(codec: str, levels: int, values: Floats) -> None:
    error = np.abs(decode(codec, encode(codec, values), len(values)).astype(np.float64) - values)
    for start in range(0, len(values), BLOCK):
        block = np.abs(values[start : start + BLOCK].astype(np.float64))
        # Half a step, its rounding in float32, and the smallest floats, which have few bits.
        step = block.max() / levels
        assert error[start : start + BLOCK].max() <= 0.5 * step * (1 + 1e-4) + levels * 2.0**-149


@given(values=vectors)
@settings(max_examples=60, deadline=None)
def test_topk_keeps_the_largest_and_only_those(values: Floats) -> None:
    back = decode("topk", encode("topk", values), len(values))
    kept = -(-len(values) // SPARSE)
    assert (back != 0).sum() <= kept
    if kept:
        threshold = np.sort(np.abs(values))[-kept]
        assert (np.abs(values[back != 0]) >= threshold).all()
        assert np.isin(np.flatnonzero(np.abs(values) > threshold * (1 + 2.0**-7)), np.flatnonzero(back)).all()


def test_bytes_per_value_are_those_of_the_table() -> None:
    count = 1 << 20
    per_value = [nbytes(codec, count) / count for codec in CODECS]
    assert per_value == [4, 2, 1 + 1 / 64, 0.5 + 1 / 64, 6 / 32]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk"])
def test_with_feedback_the_sum_of_what_arrives_follows_the_sum_of_what_was_sent(codec: str) -> None:
    generator = np.random.default_rng(0)
    sender, sent, received = Feedback(codec, 1000), np.zeros(1000), np.zeros(1000)
    for _ in range(200):
        update = generator.normal(size=1000).astype(np.float32)
        sent += update
        received += decode(codec, sender.encode(update), 1000)
        sender.settle(counted=True)
    # What is missing is what the sender still holds, however many updates there were: for topk the values that waited
    # longest, about SPARSE updates' worth of a random walk.
    bound = {"bf16": 0.02, "int8": 0.05, "int4": 1.0, "topk": 3 * SPARSE}[codec]
    assert np.abs(sent - received).max() < bound


def test_of_an_update_that_did_not_count_nothing_is_owed() -> None:
    sender, update = Feedback("int4", 8), np.linspace(0.1, 1, 8, dtype=np.float32)
    first = sender.encode(update)
    sender.settle(counted=False)
    assert (sender.encode(update) == first).all()
    sender.settle(counted=True)
    assert (sender.encode(update) != first).any()


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=600), count=st.integers(0, 600))
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_the_decoder_fail_otherwise_than_by_name(codec: str, data: bytes, count: int) -> None:
    padded = (data + bytes(nbytes(codec, count)))[: nbytes(codec, count)]
    for each in (data, padded):
        try:
            with np.errstate(over="ignore"):
                assert decode(codec, each, count).shape == (count,)
        except Undecodable:
            pass


def test_places_that_do_not_rise_or_leave_the_vector_are_refused() -> None:
    for places in ([5, 5], [5, 4], [5, 64]):
        data = np.array(places, "<u4").tobytes() + bytes(4)
        with pytest.raises(Undecodable, match="places"):
            decode("topk", data, 64)


def test_a_codec_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="unknown codec 'zip'; choose one of: fp32, bf16, int8, int4, topk"):
        nbytes("zip", 1)
