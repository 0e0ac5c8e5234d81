"""Documents that a batch refers to."""

from api.batches.documents import HEADER_BYTES, Counts, decode_header, encode_segment


def test_counts_of_the_largest_batch_fit_the_head_of_a_segment() -> None:
    """Readers fetch only the first bytes of a segment."""
    lines, amount = 10**6, 10**12
    counts = Counts(lines, lines, lines, amount, amount, amount, amount, amount)
    data = encode_segment(counts, [])
    assert len(data) == HEADER_BYTES
    assert decode_header(data).counts == counts
