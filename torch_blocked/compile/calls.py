"""How code that Inductor generates calls the operators: through a pointer, with their arguments as words.

Inductor calls custom operators by name, with a list of boxed values, which costs 4 to 11 microseconds. It knows C
functions for them, too (`torch._inductor.config.aot_inductor.custom_ops_to_c_shims`): those below are inline, so that
nothing is linked, and take the pointer from the operator `entry_point` (csrc/library/calls.h) at their first call.
"""

from __future__ import annotations

from functools import cache

from torch._ops import OpOverload

from torch_blocked import library

_OPERATORS = (  # as csrc/library/calls.cpp has them
    library.convolution_op, library.convolution_out_op, library.convolution_chain_op,
    library.convolution_transpose_op, library.convolution_transpose_out_op, library.copy_out_op,
    library.layer_norm_channels_op, library.linear_op, library.new_empty_op, library.pool_op,
)  # fmt: skip

# A type in a schema -> what Inductor passes for it
_C_TYPES = {
    "Tensor": ["AtenTensorHandle"],
    "Optional[Tensor]": ["AtenTensorHandle*"],
    "List[Tensor]": ["const AtenTensorHandle*", "int64_t"],
    "List[Optional[Tensor]]": ["const AtenTensorHandle**", "int64_t"],
    "int": ["int64_t"],
    "Optional[int]": ["int64_t*"],
    "List[int]": ["const int64_t*", "int64_t"],
    "Optional[List[int]]": ["TorchBlockedOptionalList", "int64_t"],
    "float": ["double"],
    "List[float]": ["const double*", "int64_t"],
    "bool": ["int32_t"],
    "str": ["const char*"],
}

_HELPERS = [
    """"C++" struct TorchBlockedOptionalList {
        const int64_t* const* data;
        TorchBlockedOptionalList(const int64_t** list) : data(list) {}
        TorchBlockedOptionalList(std::nullptr_t) : data(nullptr) {}
        TorchBlockedOptionalList(std::nullptr_t*) : data(nullptr) {}  // an empty one
    }""",
    '"C++" inline int64_t torch_blocked_word(TorchBlockedOptionalList list) { return int64_t(list.data); }',
    '"C++" inline int64_t torch_blocked_word(int64_t value) { return value; }',
    """"C++" inline int64_t torch_blocked_word(double value) {
        int64_t bits;
        __builtin_memcpy(&bits, &value, sizeof(bits));
        return bits;
    }""",
    '"C++" inline int64_t torch_blocked_word(const void* value) { return reinterpret_cast<int64_t>(value); }',
    """"C++" inline auto torch_blocked_entry_point(int64_t schema_hash) {
        StableIValue stack[] = {static_cast<StableIValue>(schema_hash)};
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("torch_blocked::entry_point", "", stack));
        return reinterpret_cast<void (*)(const int64_t*)>(stack[0]);
    }""",
]


class Calls(dict[OpOverload, list[str]]):
    """Operators and their functions in C++, as Inductor's setting.

    Operators cannot be pickled; of the key of Inductor's cache this build is a part anyway.
    """

    def __reduce__(self) -> tuple:
        return calls, ({},)

    def __deepcopy__(self, memo: dict) -> Calls:
        return self


def calls(given: dict[OpOverload, list[str]]) -> dict[OpOverload, list[str]]:
    """The setting `custom_ops_to_c_shims`, with `given` ones of others."""
    return {**given, **_calls()} if given and given != _calls() else _calls()


@cache
def _calls() -> Calls:
    functions = {op: [_function(op)] for op in _OPERATORS}
    first = next(iter(functions))
    return Calls({**functions, first: [*_HELPERS, *functions[first]]})


def _function(op: OpOverload) -> str:
    schema = op._schema
    given = [c_type for argument in schema.arguments for c_type in _C_TYPES[str(argument.type)]]
    types = given + ["AtenTensorHandle*"] * max(1, len(schema.returns))  # a null pointer for what returns nothing
    parameters = ", ".join(f"{c_type} a{i}" for i, c_type in enumerate(types))
    words = ", ".join(f"torch_blocked_word({_widened(c_type)}a{i})" for i, c_type in enumerate(types))
    name = schema.name.removeprefix("torch_blocked::")
    return f""""C++" inline AOTITorchError aoti_torch_cpu_{name}({parameters}) {{
        static const auto call = torch_blocked_entry_point({_hash(str(schema))}LL);
        const int64_t words[] = {{{words}}};
        call(words);
        return AOTI_TORCH_SUCCESS;
    }}"""


def _widened(c_type: str) -> str:
    return "(int64_t)" if c_type in ("int32_t", "int64_t") else ""


def _hash(text: str) -> int:
    """FNV-1a, of 64 bits, as a signed number."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value
