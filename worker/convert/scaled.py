"""Finds the stored tensors that make up a quantised weight: FP8 of DeepSeek, Qwen, fbgemm and
ModelOpt, NVFP4, the formats of compressed-tensors, GPTQ, AWQ, bitsandbytes and MLX.

Such tensors become one tensor of float32 values, the products that the source's own framework
computes. llama.cpp has a type like NVFP4, but reads its scale of the whole tensor for some kinds of
tensors only, so these weights are written like others. Any other method of a
`quantization_config` is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from worker.convert.config import MOST, Config
from worker.convert.grid import FP4, Grid, Packing, Read, Scaled, Values, e4m3, e8m0
from worker.convert.safetensors import TensorInfo
from worker.errors import ModelError

_KNOWN: Mapping[str, tuple[str, Collection[str]]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes"), ("", ())),
    "modelopt": (
        "quant_algo",
        ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "mxfp4", "MXFP8"),
    ),
    "compressed-tensors": (
        "format",
        (
            *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
            *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
        ),
    ),
    "gptq": ("checkpoint_format format", ("", "gptq", "gptq_v2")),
    "awq": ("version checkpoint_format", ("", "gemm", "GEMM")),
    "MLX": ("mode", ("", "affine", "mxfp4", "mxfp8", "nvfp4")),
}
"""The methods that can be converted, each with the key of its format (also its older name) and the
known formats."""
_GPTQ_OR_AWQ = ("gptq", "awq")
_MIXED = {"mixed-precision": "config_groups", "MIXED_PRECISION": "quantized_layers"}
"""The key under which a mixed method lists its parts, each with a format of its own."""
_NUMBERS = ("F8_E4M3", "I8", "I32", "U8")
"""Types that need a scale; an I32 holds as many integers as fit into it, a U8 two FP4."""
_FLOATS = ("BF16", "F16", "F32")
_GPTQ_N_BITS = (2, 3, 4, 8)
_MLX_N_BITS = (2, 3, 4, 5, 6, 8)
_MLX_TABLES: Mapping[str, tuple[Values, Values]] = {
    "mxfp4": (FP4, e8m0()),
    "mxfp8": (e4m3(), e8m0()),
    "nvfp4": (FP4, e4m3()),
}
"""The values of numbers and scales, in the modes whose numbers are not integers."""
_AWQ = Packing(4, across_rows=True, positions=(0, 4, 1, 5, 2, 6, 3, 7))
_BNB_8_STEP = 1 / 127
"""bitsandbytes' scale is the value of the largest eight-bit integer, 127."""
_MAX_STATE_BYTES = 1 << 16
_OF_ACTIVATIONS = r".*(\.(input|output|q|k|v)(_global)?|[._]activation)_(scale|zero_point)(_ub)?"
"""Tensors for quantising activations, which are not quantised here."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the tensors that make up a weight: their suffixes, after the stem that they
    share."""

    weight: str = ""
    numbers: str = ""
    scale: str = ""
    outer: str = ""
    zero: str = ""
    shift: str = ""
    order: str = ""
    others: tuple[str, ...] = ()
    types: Collection[str] = _NUMBERS
    is_transposed: bool = False
    """A row of the weight is a column of the stored matrices."""


_BNB_4 = Names(
    scale=".absmax",
    outer=".nested_absmax",
    others=(
        *(".quant_map", ".nested_quant_map"),
        *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    ),
    types=(*_NUMBERS, *_FLOATS),
)
"""The bytes may be declared as any type."""
_BNB_8 = Names(
    weight="weight",
    numbers="weight",
    scale="SCB",
    others=("weight_format",),
    types=("I8",),
)
_GPTQ_AWQ = Names(
    weight="weight",
    numbers="qweight",
    scale="scales",
    zero="qzeros",
    order="g_idx",
    types=("I32",),
    is_transposed=True,
)
_MLX = Names(
    weight="weight",
    numbers="weight",
    scale="scales",
    shift="biases",
    types=("U32",),
)
_PLAIN = Names(scale="_scale", outer="_scale_2", zero="_zero_point", order="_g_idx")
_INVERSE = replace(_PLAIN, scale="_scale_inv")
_PACKED = replace(_PLAIN, numbers="_packed", outer="_global_scale", others=("_shape",))
_NAMES = (_INVERSE, _PLAIN, _PACKED, _GPTQ_AWQ, _MLX, _BNB_8, _BNB_4)


@dataclass(frozen=True, slots=True)
class Parts:
    """The stored tensors of one weight."""

    stem: str
    names: Names
    tensors: Mapping[str, TensorInfo]

    @property
    def numbers(self) -> TensorInfo:
        return self.needed(self.names.numbers)

    @property
    def scale(self) -> TensorInfo:
        return self.needed(self.names.scale)

    def get(self, end: str) -> TensorInfo | None:
        info = self.tensors.get(self.stem + end)
        if info is None or not self.names.is_transposed or end in (self.names.order, "bias"):
            return info
        if len(info.shape) != 2:
            raise ModelError(
                f"tensor {info.name} has shape {list(info.shape)}, which is not a matrix",
                tensor=info.name,
            )
        return replace(info, shape=info.shape[::-1], is_transposed=True)

    def needed(self, end: str) -> TensorInfo:
        if (info := self.get(end)) is None:
            beside = self.tensors[self.stem + self.names.numbers].path
            name = self.stem + end
            raise ModelError(f"{beside} lacks tensor {name}", tensor=name)
        return info


@dataclass(frozen=True, slots=True)
class Method:
    """What the configuration says about weights that their tensors do not."""

    name: str = ""
    """`quant_method`; empty if the weights are not quantised."""
    blocks: Collection[tuple[int, int]] = ()
    """How many rows and columns share a scale; the last block of a weight may be smaller."""
    n_bits: Collection[int] = ()
    has_zeros: bool = False
    """Every weight must have zero points."""
    has_powers: bool = False
    """Scales of type U8 are exponents, as in MXFP4 and MXFP8."""
    is_one_less: bool = False
    """Zero points are stored minus 1, as in GPTQ's first format."""
    is_symmetric: bool = False
    """GPTQ's zero points must be the middle number."""
    modules: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """MLX's bits per number, numbers per scale and mode, by the name of a module; the empty name is
    for all others."""

    def module(self, stem: str) -> tuple[int, int, str]:
        return self.modules.get(stem.removesuffix("."), self.modules.get("", (0, 0, "")))


def method_of(config: Config) -> Method:
    """The method of the quantised weights; raises `ModelError` if it cannot be converted."""
    usual, text = "quantization_config", config.section("text_config")
    places = (config.section(usual), config.section("quantization"), text.section(usual))
    section = next((each for each in places if each.values), None)  # The second is MLX's.
    if section is None:
        return Method()
    default = "MLX" if section.has("bits") else "compressed-tensors"
    name = section.text("quant_method", default)
    keys, known = _KNOWN.get(name, ("", ()))
    key = next((each for each in keys.split() if section.has(each)), "")
    kinds = {section.text(key)} if key else {""} if keys else set()
    for kind in kinds & _MIXED.keys():
        layers = section.section(_MIXED[kind])
        kinds = {layers.section(each).text(key, "") for each in layers.values}
    bits = section.values.get("bits", section.values.get("w_bit"))
    modules: dict[str, Config] = {}
    if name == "MLX":
        own = {key: section.section(key) for key, v in section.values.items() if type(v) is dict}
        modules = {"": section, **own}
        kinds = {each.text(keys, "") for each in modules.values()}
    if name == "awq" and bits not in (None, 4):
        kinds = {f"{bits!r:.80} bits"}
    if name not in _KNOWN or not kinds <= set(known):
        formats = ", ".join(sorted(kinds - {""}))
        those = f" ({formats})" if formats else ""
        raise ModelError(
            f"{config.name}: weights quantised by {name}{those} cannot be converted; fp8, "
            "fbgemm_fp8, mxfp4, ModelOpt's FP8 and FP4, compressed-tensors' FP8, FP4 and integers, "
            "gptq, awq (gemm of 4 bits), bitsandbytes and MLX's can. Use the unquantised "
            "checkpoint, or a GGUF",
            quant_method=name,
        )
    if section.section("transform_config").values:
        raise ModelError(f"{section.name}: llama.cpp does not implement transform_config")
    groups = section.section("config_groups")
    weights = [groups.section(each).section("weights") for each in groups.values]
    blocks = [_block(section, "weight_block_size")]
    blocks += [_block(each, "block_structure") for each in weights]
    n_bits = {each.integer("num_bits") for each in weights if each.has("num_bits")}
    has_zeros = bool(weights) and all(each.values.get("symmetric") is False for each in weights)
    if name in _GPTQ_OR_AWQ:
        size = section.values.get("group_size")
        blocks = [(1, size if type(size) is int else 0)]
        n_bits, has_zeros = {bits} if type(bits) is int else set(), True
    return Method(
        name,
        blocks={each for each in blocks if min(each) > 0},
        n_bits=n_bits,
        has_zeros=has_zeros,
        has_powers=any(kind.lower().startswith("mx") for kind in kinds),
        is_one_less=name == "gptq" and kinds != {"gptq_v2"},
        # A module of `dynamic` may have another `sym`.
        is_symmetric=name == "gptq"
        and section.values.get("sym") is True
        and not section.values.get("dynamic"),
        modules={
            key: (each.integer("bits"), each.integer("group_size"), each.text(keys, ""))
            for key, each in modules.items()
        },
    )


def _block(section: Config, key: str) -> tuple[int, int]:
    block = section.values.get(key) or [0, 0]
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block):
        return block[0], block[1]
    raise ModelError(f"{section.name}: {key} must be two numbers, not {block!r:.80}")


def join(
    tensors: MutableMapping[str, TensorInfo], method: Method, read: Read
) -> tuple[dict[str, Scaled], set[str]]:
    """Replace stored tensors in `tensors` by the F32 weights that they make up; remove those for
    activations. Numbers without a scale are reported only if the model needs the tensor.

    Returns the weights, and the names of all-zero biases beside them: AutoGPTQ gives one to every
    layer, whether the model has it or not.

    Raises:
        ModelError: scales do not fit their weight, or are of an unknown type.
    """
    made: dict[str, Scaled] = {}
    idle: set[str] = set()
    is_flat = method.name in ("fbgemm_fp8", *_GPTQ_OR_AWQ)  # Others' experts may be in a stack.
    for info, names in [(info, names) for info in tensors.values() for names in _NAMES]:
        stem = info.name.removesuffix(names.numbers)
        is_named = info.name.endswith(names.numbers) and stem + names.scale in tensors
        if not is_named or info.dtype not in names.types:
            continue
        if names is not _BNB_4 and len(info.shape) not in ((2,) if is_flat else (2, 3)):
            continue
        parts, name = Parts(stem, names, tensors), stem + names.weight
        numbers = parts.numbers
        if names.is_transposed and method.name not in _GPTQ_OR_AWQ:
            why = "no quantization_config says whether that is GPTQ or AWQ"
            raise ModelError(f"{info.path.parent} has {info.name}, and {why}", tensor=info.name)
        if 0 in numbers.shape:
            raise _unfit(parts.scale, numbers)
        if name in tensors and name != numbers.name:
            raise ModelError(
                f"{numbers.path.parent} has both {name} and {numbers.name}", tensor=name
            )
        weight, made[name] = (
            _bnb_4(parts, read) if names is _BNB_4 else _scaled(parts, method, read)
        )
        ends = (names.numbers, names.scale, names.outer, names.zero, names.shift, names.order)
        for used in {stem + end for end in (*ends, *names.others)}:
            tensors.pop(used, None)
        bias = parts.get("bias") if names is _GPTQ_AWQ else None
        if bias is not None and not read(bias, 0, bias.n_rows).any():
            idle.add(bias.name)
        tensors[name] = replace(weight, name=name, dtype="F32", is_transposed=False)
    for name in [name for name in tensors if re.fullmatch(_OF_ACTIVATIONS, name)]:
        del tensors[name]
    return made, idle


def _scaled(parts: Parts, method: Method, read: Read) -> tuple[TensorInfo, Scaled]:
    """A weight and what makes it up, with each part checked against the weight's shape."""
    names, numbers, scale = parts.names, parts.numbers, parts.scale
    shape = numbers.shape
    packing: Packing | None = None
    if numbers.dtype == "U8":
        shape, packing = (*shape[:-1], 2 * shape[-1]), Packing(4)
    elif numbers.dtype in ("I32", "U32"):
        shape, packing = _packed(parts, method, read)
    weight = replace(numbers, shape=shape)
    # Other methods pack integers into bytes, too, but with scales of the usual types.
    known = ("F8_E4M3",) if numbers.dtype == "U8" else _FLOATS
    known = (*known, "F8_E8M0", *(("U8",) if method.has_powers else ()))
    tables = _MLX_TABLES.get(method.module(parts.stem)[2]) if names is _MLX else None
    known = known if tables is None else ("U8",)
    grid, outer, zero, order = _grid(scale, weight, known, method.blocks), None, None, None
    if names.outer and (stored := parts.get(names.outer)):
        outer = _grid(stored, weight, _FLOATS)
    elif scale.dtype == "F8_E4M3":
        parts.needed(names.outer)
    if stored := parts.get(names.zero):
        zero = _zero(stored, weight, grid, packing, is_one_less=method.is_one_less)
        if method.is_symmetric and zero.of_rows(read, 0, weight.n_rows).any():
            raise ModelError(
                f"tensor {stored.name} has zero points other than the middle number, which sym of "
                "the quantization_config requires",
                tensor=stored.name,
            )
    elif method.has_zeros:
        parts.needed(names.zero)
    if stored := parts.get(names.order):
        order = _order(stored, weight, grid, read)
    if names is _BNB_8 and (stored := parts.get("weight_format")):
        if stored.size_bytes != 1 or read(stored, 0, 1).any():
            raise ModelError(
                f"tensor {stored.name} says that {numbers.name} has the layout of one kind of GPU; "
                "only plain rows can be converted",
                tensor=stored.name,
            )
    table = FP4 if numbers.dtype == "U8" else None
    shift = None
    if tables is not None:
        table, grid = tables[0], replace(grid, table=tables[1])
    elif names is _MLX and packing:
        shift = _grid(parts.needed(names.shift), weight, _FLOATS)
        table = np.arange(1 << packing.n_bits, dtype=np.float32)
        if shift.info.shape != scale.shape:
            raise _unfit(shift.info, weight)
    return weight, Scaled(
        Grid(numbers, packing=packing, table=table),
        weight.row_length,
        weight.row_length,
        grid,
        outer,
        zero=zero,
        shift=shift,
        order=order,
        factor=_BNB_8_STEP if names is _BNB_8 else 1,
    )


def _packed(parts: Parts, method: Method, read: Read) -> tuple[tuple[int, ...], Packing]:
    """The shape of a weight whose integers are packed into words, and their packing.

    compressed-tensors states the shape. A row's width follows from MLX's sizes for the module, and
    from GPTQ's index of the columns, as its layers may differ in bits, or else from the bits.
    """
    names, numbers, n_spare = parts.names, parts.numbers, 0
    shape, row_bits = numbers.shape, 8 * numbers.row_bytes
    if method.name == "awq":
        return (shape[0] * _AWQ.unit[0], shape[1]), _AWQ
    known: Collection[int] = _GPTQ_N_BITS
    if names is _MLX:
        n_bits, size, mode = method.module(parts.stem)
        widths = {n_bits: size * parts.scale.row_length}
        known = (int(mode[-1]),) if mode in _MLX_TABLES else _MLX_N_BITS
    elif not names.is_transposed:
        shape, known, n_spare = _stated(parts, read), range(1, 9), 31
        widths = dict.fromkeys(method.n_bits, shape[-1])
    elif (order := parts.get(names.order)) is not None:
        widths = dict.fromkeys(known, order.n_rows)
    else:
        widths = {n: row_bits // n for n in method.n_bits if n in known}
    fit = [n for n, w in widths.items() if n in known and 0 <= row_bits - n * w <= n_spare]
    # compressed-tensors before 0.17 left out the bits of an I32 that hold no whole integer.
    has_gaps = n_spare and fit and 32 % fit[0] and -(-shape[-1] // (32 // fit[0])) * 32 == row_bits
    if len(fit) != 1 or has_gaps:
        n, bits = (" or ".join(map(str, sorted(each))) for each in ({*widths.values()}, widths))
        what = f"{n or 'whole'} integers of {bits or [*method.n_bits]} bits without gaps"
        raise ModelError(
            f"tensor {numbers.name} has rows of {row_bits} bits, which are not {what}; those of "
            f"{', '.join(map(str, known))} bits can be converted",
            tensor=numbers.name,
        )
    return (*shape[:-1], widths[fit[0]]), Packing(fit[0])


def _stated(parts: Parts, read: Read) -> tuple[int, ...]:
    """The weight's shape as compressed-tensors states it."""
    numbers, stated = parts.numbers, parts.get("_shape")
    n = len(numbers.shape)
    if stated is None or stated.dtype not in ("I32", "I64") or prod(stated.shape) != n:
        name = f"{parts.stem}_shape"
        raise ModelError(f"{numbers.path} lacks {name}, of {n} whole numbers", tensor=name)
    stored = read(stated, 0, stated.n_rows).view(f"<i{int(stated.dtype[1:]) // 8}")
    shape = tuple(stored.reshape(-1).tolist())
    if shape[:-1] != numbers.shape[:-1]:
        raise _unfit(stated, replace(numbers, shape=shape))
    return shape


def _grid(
    info: TensorInfo,
    weight: TensorInfo,
    known: Collection[str],
    blocks: Collection[tuple[int, int]] = (),
) -> Grid:
    """The configuration's blocks, if there are as many numbers; else, by the shape, one number for
    the whole tensor, for equal groups of rows, or for equal parts of these. In a stack, each member
    has its own."""
    _check_type(info, known)
    n_members, (height, width) = prod(weight.shape[:-2]), weight.shape[-2:]
    found = info.n_rows, info.row_length
    for rows, columns in blocks:  # The last part of an extent may be shorter.
        cut = n_members * -(-height // rows), -(-width // columns)
        if cut == found and (n_members == 1 or height % rows == 0):
            return Grid(info, min(rows, height), min(columns, width))
    is_one = info.n_rows == 1 or info.n_rows % n_members == 0
    if 0 in found or not is_one or weight.n_rows % info.n_rows or width % info.row_length:
        raise _unfit(info, weight)
    return Grid(info, weight.n_rows // info.n_rows, width // info.row_length)


def _check_type(info: TensorInfo, known: Collection[str]) -> None:
    if info.dtype not in known:
        why = f"scales by values of type {info.dtype}; {', '.join(known)} are known"
        raise ModelError(f"{info.path}: tensor {info.name} {why}", tensor=info.name)


def _zero(
    info: TensorInfo, weight: TensorInfo, scale: Grid, packing: Packing | None, is_one_less: bool
) -> Grid:
    """Zero points: a byte each, or packed into I32s down the columns."""
    packing = packing if info.dtype == "I32" else None
    packing = packing and replace(packing, across_rows=True, is_one_less=is_one_less)
    of, n_rows = scale.info, scale.info.n_rows
    is_cut = packing is not None and len(of.shape) > 2 and of.shape[-2] % packing.unit[0]
    n_rows = n_rows if packing is None else -(-n_rows * packing.n_bits // 32)
    is_known = info.dtype == "I8" or packing is not None
    if not is_known or is_cut or (info.n_rows, info.row_length) != (n_rows, of.row_length):
        raise _unfit(info, weight)
    return Grid(info, scale.rows, scale.columns, packing)


def _order(
    info: TensorInfo, weight: TensorInfo, scale: Grid, read: Read
) -> npt.NDArray[np.int32] | None:
    """For each column, the column of its scale; `None` if these are in order."""
    if info.dtype != "I32" or info.shape != weight.shape[-1:]:
        raise _unfit(info, weight)
    order = read(info, 0, info.n_rows).view("<i4").reshape(-1)
    in_turn = np.arange(order.size) // scale.columns
    if not np.array_equal(np.sort(order), in_turn):
        raise _unfit(info, weight)
    return None if np.array_equal(order, in_turn) else order


class _State(msgspec.Struct):
    """bitsandbytes' description of a weight in JSON."""

    blocksize: Annotated[int, msgspec.Meta(ge=2, le=1 << 16, multiple_of=2)]
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)], ...],
        msgspec.Meta(min_length=2, max_length=8),
    ]
    nested_blocksize: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    nested_offset: Annotated[float, msgspec.Meta(gt=-MOST, lt=MOST)] = 0.0


def _bnb_4(parts: Parts, read: Read) -> tuple[TensorInfo, Scaled]:
    """A weight of bitsandbytes in four bits: indices into a table, in blocks with a scale each. A
    block may continue in the next row."""
    numbers, state = parts.numbers, _state(parts, read)
    n_values, columns = prod(state.shape), state.blocksize
    if 2 * numbers.size_bytes != n_values or n_values % columns:
        raise ModelError(
            f"tensor {numbers.name} has {numbers.size_bytes} bytes, which are not blocks of "
            f"{columns} values of four bits for {list(state.shape)}",
            tensor=numbers.name,
        )
    n = n_values // columns
    matrix = replace(numbers, dtype="U8", shape=(n, columns // 2))
    table = _table(parts, ".quant_map", 16, read)
    outer = nested = None
    if parts.scale.dtype == "U8":
        nested = _table(parts, ".nested_quant_map", 256, read)
        outer = _column(parts, ".nested_absmax", -(-n // state.nested_blocksize))
    return replace(numbers, shape=state.shape), Scaled(
        Grid(matrix, packing=Packing(4, positions=(1, 0)), table=table),
        columns,
        state.shape[-1],
        Grid(_column(parts, ".absmax", n, ("F32", "U8")), 1, columns, table=nested),
        None if outer is None else Grid(outer, state.nested_blocksize, columns),
        scale_plus=state.nested_offset if nested is not None else 0.0,
    )


def _state(parts: Parts, read: Read) -> _State:
    *_, nf4, fp4 = parts.names.others
    info = parts.get(fp4) or parts.needed(nf4)
    try:
        if info.dtype != "U8" or info.size_bytes > _MAX_STATE_BYTES:
            raise ValueError(f"{info.size_bytes} bytes of type {info.dtype} cannot be one")
        return msgspec.json.decode(read(info, 0, info.n_rows).tobytes(), type=_State)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"tensor {info.name} is not a description of a weight: {error}", tensor=info.name
        ) from None


def _column(parts: Parts, end: str, n_values: int, known: Collection[str] = ("F32",)) -> TensorInfo:
    info = parts.needed(end)
    _check_type(info, known)
    if prod(info.shape) != n_values:
        raise ModelError(
            f"tensor {info.name} has shape {list(info.shape)}, not {n_values} values",
            tensor=info.name,
        )
    return replace(info, shape=(n_values, 1))


def _table(parts: Parts, end: str, n_values: int, read: Read) -> Values:
    values: Values = read(_column(parts, end, n_values), 0, n_values).reshape(-1)
    return values


def _unfit(info: TensorInfo, weight: TensorInfo) -> ModelError:
    shape = info.shape[::-1] if info.is_transposed else info.shape
    shapes = f"of shape {list(shape)} cannot scale {list(weight.shape)}"
    return ModelError(f"tensor {info.name} {shapes}", tensor=info.name)
