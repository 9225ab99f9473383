"""Formats and a size for the tests of `BlockedTensor`, whether two share memory, and the way through a file."""

import io

import torch

TAGS = "nChw16c nChw8c Chwn4c nhwC16c OIhw16i16o OIhw4i16o4i Ohwi16o ABCd3b2a2b5c".split()

SIZE = (3, 21, 2, 4)


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def save_and_load(y, **options):
    file = io.BytesIO()
    torch.save(y, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=True)
