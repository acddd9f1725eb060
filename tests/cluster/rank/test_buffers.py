"""What a step fills reaches the device in few copies."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.rank.buffers import ALIGNMENT, MAX_GAP_BYTES, Staging, StaticBuffer, joined

SPANS = st.lists(
    st.tuples(st.integers(0, 8 * MAX_GAP_BYTES), st.integers(1, MAX_GAP_BYTES)).map(
        lambda span: (span[0], span[0] + span[1])
    )
)


@given(spans=SPANS)
def test_each_staged_byte_is_copied_once_and_no_two_copies_could_be_one(
    spans: list[tuple[int, int]],
) -> None:
    copies = joined(spans)
    for start, end in spans:
        assert sum(first <= start and end <= last for first, last in copies) == 1
    for (_, end), (start, _) in itertools.pairwise(copies):
        assert start - end > MAX_GAP_BYTES
    edges = {edge for span in spans for edge in span}
    assert {edge for copy in copies for edge in copy} <= edges


@given(
    shapes=st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
            st.sampled_from([torch.bool, torch.int32, torch.int64, torch.float64]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_buffers_of_one_staging_do_not_overlap(
    shapes: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    staging = Staging(torch.device("cpu"))
    buffers = [StaticBuffer(shape, dtype, staging) for shape, dtype in shapes]
    staging.allocate()
    for value, buffer in enumerate(buffers):
        buffer.host[...] = value % 2
    staged = [buffer.stage(shape[0]) for buffer, (shape, _) in zip(buffers, shapes, strict=True)]
    staging.upload()
    for value, ((shape, dtype), tensor) in enumerate(zip(shapes, staged, strict=True)):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert (tensor == value % 2).all()
        assert (tensor.data_ptr() - staged[0].data_ptr()) % ALIGNMENT == 0
