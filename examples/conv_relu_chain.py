"""The drop-in chain: one line makes Conv2d/ReLU layers run blocked."""

import torch
from torch import nn

import torch_blocked as tb

chain = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
x = torch.randn(1, 3, 56, 56)
expected = chain(x).detach()

chain.to(tb.blocked)
y = chain(x)

print(y.format.tag, tuple(y.shape), "physical", tuple(y.physical.shape))
torch.testing.assert_close(y.to_dense(), expected, rtol=1e-4, atol=1e-5)
print("the same answer as plain; as NCHW again, strides", y.to_dense().stride())
