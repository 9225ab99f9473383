"""The backend of torch.compile where it can do nothing, or a part: as plain torch.compile, right or the same error."""

import pytest
import torch
from backend_cases import Lambda, assert_close, block, both, conv, fresh  # noqa: F401
from torch import nn

import torch_blocked as tb


def compiled(model, **options):
    """With graph breaks, as users compile."""
    return torch.compile(model, backend="torch_blocked", **options)


# ---- Hooks


def doubled(module, arguments, answer):
    return 2 * answer


def shifted(module, arguments):
    return (arguments[0] + 1,)


HOOKS = {
    "forward": lambda model: model.layers.a.register_forward_hook(doubled),
    "forward of the whole": lambda model: model.register_forward_hook(doubled),
    "before forward": lambda model: model.layers.b.register_forward_pre_hook(shifted),
    "both": lambda model: (model.layers.n.register_forward_hook(doubled), model.register_forward_pre_hook(shifted)),
}


@both
@pytest.mark.parametrize("name", HOOKS)
@torch.no_grad()
def test_hooks(name, blocked, graphs):
    model, x = block(), torch.randn(2, 3, 6, 5)
    HOOKS[name](model)
    want = model(x)
    function = compiled(model.to(tb.blocked) if blocked else model)
    for _ in range(2):
        assert_close(function(x), want)
    assert graphs


def test_gradient_hooks(graphs):
    plain, x = block(), torch.randn(2, 3, 6, 5)
    found = {"plain": [], "compiled": []}

    def gradients(name, function):
        weight = plain.layers.b.weight
        handle = weight.register_hook(lambda grad: found[name].append(grad.clone()) or 3 * grad)
        weight.grad = None
        function(x).square().sum().backward()
        handle.remove()
        return weight.grad

    torch.testing.assert_close(gradients("compiled", compiled(plain)), gradients("plain", plain), rtol=1e-4, atol=1e-4)
    assert len(found["plain"]) == len(found["compiled"]) == 1


# ---- Control flow that data decides


def branches(m, x):
    y = m.a(x)
    return m.b(y) if y.mean() > 0 else y - 1


def repeats(m, x):
    y = m.a(x)
    for _ in range(int(x.abs().max()) % 3 + 1):
        y = m.b(y).relu()
    return y


@both
@pytest.mark.parametrize("function", [branches, repeats])
@torch.no_grad()
def test_control_flow(function, blocked, graphs):
    model = Lambda(function, a=conv(3, 17), b=conv(17, 17)).eval()
    xs = [torch.full((1, 3, 6, 5), value) for value in (-2.0, 2.0, 4.0)]
    want = [model(x) for x in xs]
    fast = compiled(model.to(tb.blocked) if blocked else model)
    for x, answer in zip(xs, want, strict=True):
        assert_close(fast(x), answer)


@torch.no_grad()
def test_control_flow_breaks_a_full_graph_as_ever():
    model, x = Lambda(branches, a=conv(3, 17), b=conv(17, 17)), torch.randn(1, 3, 6, 5)
    messages = []
    for backend in ("torch_blocked", "eager"):
        with pytest.raises(torch._dynamo.exc.Unsupported) as error:
            torch.compile(model, backend=backend, fullgraph=True)(x)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


# ---- Types and devices that have no kernel


class Spectrum(nn.Module):
    """A complex convolution beside one of float32."""

    def __init__(self):
        super().__init__()
        self.real, self.complex = nn.Conv2d(3, 17, 3), nn.Conv2d(3, 4, 3).to(torch.complex64)

    def forward(self, x):
        return self.real(x), self.complex(torch.complex(x, -x))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@torch.no_grad()
def test_complex(graphs):
    model, x = Spectrum(), torch.randn(2, 3, 6, 5)
    for actual, expected in zip(compiled(model)(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_meta():
    model = conv(3, 17).to("meta")
    answer = compiled(model)(torch.randn(2, 3, 6, 5, device="meta"))
    assert answer.shape == (2, 17, 6, 5) and answer.device.type == "meta"


# name -> (model, src): errors that PyTorch has its words for
WRONG = {
    "channels": (lambda: conv(3, 17), lambda: torch.randn(2, 4, 6, 5)),
    "dtype": (lambda: conv(3, 17), lambda: torch.randn(2, 3, 6, 5, dtype=torch.float64)),
    "too small": (lambda: conv(3, 17, padding=0), lambda: torch.randn(2, 3, 2, 2)),
}


@pytest.mark.parametrize("name", WRONG)
@torch.no_grad()
def test_errors(name):
    make, src = WRONG[name]
    model, x = make(), src()
    types = []
    for backend in ("torch_blocked", "inductor"):
        torch._dynamo.reset()
        with pytest.raises(Exception) as error:
            torch.compile(model, backend=backend)(x)
        types.append(type(error.value))
    assert types[0] is types[1]


@pytest.mark.parametrize("unknown", [False, True])
def test_sizes_are_asserted_where_an_operator_is_unknown(graphs, unknown):
    convolution, x = nn.Conv2d(3, 8, 3).eval(), torch.randn(1, 3, 8, 8)

    def call(x):
        y = torch.relu(convolution(x)).amax((2, 3))
        return torch.linalg.matrix_exp(y @ y.T) if unknown else y

    with torch.no_grad():
        assert_close(torch.compile(call, backend="torch_blocked")(x), call(x))
    assert graphs.size_asserts == [unknown]


def test_sizes_are_asserted_in_training(graphs):
    convolution = nn.Conv2d(3, 8, 3)
    torch.compile(lambda x: convolution(x).sum(), backend="torch_blocked")(torch.randn(1, 3, 8, 8)).backward()
    assert graphs.size_asserts == [True, True]
