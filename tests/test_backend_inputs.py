"""The backend of torch.compile where it can do nothing, or a part: as plain torch.compile, right or the same error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from backend_cases import Lambda, assert_close, block, both, conv, fresh  # noqa: F401
from conftest import dense
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


# ---- Inputs that are written to, outputs that share memory


def relu_in_place(m, x):
    return m.c(torch.relu_(x)).to_dense()


def product_in_place(m, x):
    x.mul_(2)
    return (m.c(x) + x[:, :1]).to_dense()


@both
@pytest.mark.parametrize("function", [relu_in_place, product_in_place])
def test_inputs_that_are_written_to(function, blocked, graphs):
    model = Lambda(function, c=conv(20, 24))
    plain, traced = copy.deepcopy(model), compiled(model.to(tb.blocked) if blocked else model)
    leaves = [torch.randn(2, 20, 6, 5, requires_grad=True)] * 2
    leaves[1] = leaves[0].detach().clone().requires_grad_()
    for leaf, f in zip(leaves, (traced, plain), strict=True):
        f(leaf * 1).square().sum().backward()
    assert type(leaves[0].grad) is torch.Tensor
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-3, atol=1e-3)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(dense(p.grad), q.grad, rtol=1e-3, atol=1e-3)


def written_after(y):
    part = y[:, 5:20]
    part.mul_(2)
    y += 1
    return y, part


def whole_and_pooled(y):
    values, indices = F.max_pool2d(y, 2, return_indices=True)
    return values, indices, values[:, 1], y


# Of a convolution's answer of 24 channels. The first output holds what the others are views of.
SHARED = {
    "a part": lambda y: (y, y[:, :3]),
    "detached": lambda y: (y, y.detach()),
    "permuted": lambda y: (y, y.permute(0, 2, 3, 1)),
    "other axes": lambda y: (y, y.flatten(2), y.unflatten(1, (4, 6))[:, 1]),
    "a part of a part": lambda y: (y, y[:, 4:].transpose(2, 3)[:, ::3]),
    "one of several": lambda y: (y, *y.split(7, 1)[1:3]),
    "written to after": written_after,
    "written to": lambda y: (y.relu_(), y),
    "views alone": lambda y: (y.detach(), y[:, 2], y[..., 1:]),
    "values and indices": whole_and_pooled,
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", SHARED)
@torch.no_grad()
def test_outputs_that_share_memory(name, memory_format, graphs):
    """A write to one is seen in the others."""
    function = SHARED[name]
    model = Lambda(lambda m, x: function(m.c(x)), c=conv(20, 24))
    x = torch.randn(2, 20, 6, 5).to(memory_format=memory_format)
    expected, actual = model(x), compiled(model)(x)
    for _ in range(2):
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
            assert a.stride() == e.stride() and a.untyped_storage().nbytes() == e.untyped_storage().nbytes()
        for outputs in (actual, expected):
            outputs[0].fill_(3)


@torch.no_grad()
def test_parts_of_copies_are_no_views_of_inputs(graphs):
    def function(m, x):
        part = x[:, 1:].clone().chunk(2, 1)[0]
        y = m.c(x)
        x.zero_()
        return y, part

    model, x = Lambda(function, c=conv(3, 24)), torch.randn(2, 3, 6, 5)
    expected = x[:, 1:2].clone()
    assert torch.equal(compiled(model)(x)[1], expected)


@torch.no_grad()
def test_parts_of_what_parameters_alone_decide_are_made_anew(graphs):
    def function(m, x):
        scale = m.c.bias * 2
        return m.c(x) * scale[:, None, None], scale.chunk(2)[0]

    model, x = Lambda(function, c=conv(3, 24)), torch.randn(2, 3, 6, 5)
    fast = compiled(model)
    for _ in range(2):
        for actual, expected in zip(fast(x), model(x), strict=True):
            assert_close(actual, expected)
            actual.zero_()


@torch.no_grad()
def test_views_of_copies_of_parameters(graphs):
    """Which the parameter's own strides may not permit."""
    model = Lambda(lambda m, x: m.c(x) + m.l.weight[:, :2].clone().view(24, 1, 1), c=conv(3, 24), l=nn.Linear(5, 12))
    x = torch.randn(2, 3, 6, 5)
    assert_close(compiled(model)(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.d(m.c(x) * x.shape[-1]),
        lambda m, x: m.d(m.c(x) * x.shape[-1] ** -0.5),
        lambda m, x: m.c((x.permute(0, 2, 3, 1) * x.shape[2]).permute(0, 3, 1, 2)),
        lambda m, x: torch.add(m.c(x), m.c(x * 2), alpha=x.shape[2]),
        lambda m, x: F.leaky_relu(m.c(x), 1 / x.shape[2]),
    ],
    ids=["size", "root of a size", "between permutations", "alpha", "slope"],
)
@torch.no_grad()
def test_operators_of_a_size(function, graphs):
    model = Lambda(function, c=conv(3, 24), d=conv(24, 7, 1))
    fast = compiled(model, dynamic=True)
    for size in ((12, 10), (9, 8)):
        x = torch.randn(2, 3, *size)
        assert_close(fast(x), model(x))


@pytest.mark.parametrize("part", [lambda y: y[:, :3], lambda y: y[:, 3], lambda y: y.split(7, 1)[0]])
@torch.no_grad()
def test_a_part_of_a_block_is_laid_out_anew(part, graphs):
    """Not with the strides of the block's bytes, nor does it hold them."""
    model, x = Lambda(lambda m, x: part(m.c(x)), c=conv(20, 24)), torch.randn(2, 20, 6, 5)
    y = compiled(model)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    assert y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes


@torch.no_grad()
def test_views_of_inputs_stay_views(graphs):
    views, x = lambda x: (x[:, :3], x.transpose(1, 2), x[..., :1], x[:, ::2, ::2, ::2], x[:1]), torch.randn(2, 20, 6, 5)
    _, *actual = compiled(Lambda(lambda m, x: (m.c(x), *views(x)), c=conv(20, 24)))(x)
    for a, e in zip(actual, views(x), strict=True):
        assert a.data_ptr() == x.data_ptr() and a.stride() == e.stride() and a.shape == e.shape
    (_, alone) = compiled(Lambda(lambda m, x: (m.c(x), x[..., :1]), c=conv(20, 24)))(x)
    assert alone.data_ptr() == x.data_ptr()


@torch.no_grad()
def test_outputs_of_sizes_that_data_decide(graphs):
    def function(m, x):
        y, positive = m.c(x), x[:, 0] > 0
        return y, positive.nonzero(), x[:, 0][positive], y[positive[:, 0, 0]], y.masked_select(y > 0)

    model, x = Lambda(function, c=conv(20, 24)), torch.randn(5, 20, 6, 5)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = compiled(model, fullgraph=True)(x)
    assert all(type(a) is torch.Tensor for a in actual)
    torch.testing.assert_close(actual, model(x), rtol=1e-4, atol=1e-4)
