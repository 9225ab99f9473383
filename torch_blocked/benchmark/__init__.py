"""`python -m torch_blocked bench`: operators on blocked tensors against PyTorch's own, interleaved in one process."""
