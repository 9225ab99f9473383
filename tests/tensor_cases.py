"""Formats and a size for the tests of `BlockedTensor`, and whether two share memory."""

TAGS = "nChw16c nChw8c Chwn4c nhwC16c OIhw16i16o OIhw4i16o4i Ohwi16o ABCd3b2a2b5c".split()

SIZE = (3, 21, 2, 4)


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
