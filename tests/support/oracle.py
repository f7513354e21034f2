"""The casts of docs/numerics.md in numpy, without code of the library.

Elements are rounded in float64 on a table of the format's values; scales are fp32 operations in the
order of the rules. quantize() gives codes, scale and amax as the operator lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
SIGNS = 0xD7E8


@dataclass(frozen=True)
class Format:
    exponent_bits: int
    mantissa_bits: int
    max: float
    nan_code: int
    bias: int

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def values(self) -> np.ndarray:
        """Returns the values of codes 0, 1, …: non-negative, finite, ascending."""
        codes = np.arange(2 ** (self.bits - 1))
        e, m = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        fraction = np.where(e > 0, 2**self.mantissa_bits + m, m).astype(np.float64)
        values = np.ldexp(fraction, np.maximum(e, 1) - 1 + self.min_exponent - self.mantissa_bits)
        return values[values <= self.max]


E4M3 = Format(4, 3, 448.0, 0x7F, 7)
E5M2 = Format(5, 2, 57344.0, 0x7F, 15)
E2M1 = Format(2, 1, 6.0, 0x7, 1)
E1M2 = Format(1, 2, 1.75, 0x7, 1)


def encode(v: np.ndarray, fmt: Format, random: np.ndarray | None = None, up=False) -> np.ndarray:
    """Encodes fp32 values: nearest even, by 16 random bits each, or away from zero; saturates."""
    a = np.minimum(np.abs(v.astype(np.float64)), fmt.max)
    a = np.where(np.isnan(v), 0, a)
    exponent = np.maximum(np.frexp(a)[1] - 1, fmt.min_exponent)
    quantum = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    quanta = a / quantum  # exact: quantum is a power of two
    if random is not None:
        below = np.floor(quanta)
        is_up = np.floor((quanta - below) * 65536) + random >= 65536
        quanta = below + is_up
    else:
        quanta = np.ceil(quanta) if up else np.rint(quanta)
    code = np.searchsorted(fmt.values(), quanta * quantum).astype(np.uint8)
    code |= np.where(np.signbit(v), 1 << (fmt.bits - 1), 0).astype(np.uint8)
    return np.where(np.isnan(v), fmt.nan_code, code).astype(np.uint8)


def decode(code: np.ndarray, fmt: Format) -> np.ndarray:
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    table = np.full(1 << (fmt.bits - 1), np.nan)
    table[: len(fmt.values())] = fmt.values()
    return (np.where(code >> (fmt.bits - 1), -1.0, 1.0) * table[magnitude]).astype(F32)


def to_bf16(v: np.ndarray) -> np.ndarray:
    bits = v.astype(F32).view(np.uint32).astype(np.uint64)
    rounded = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32)
    return np.where(np.isnan(v), F32(np.nan), rounded.view(F32))


# ---- random bits ---------------------------------------------------------------------------------

MASK = (1 << 64) - 1


def mix_seed(seed: int, count: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15 * (count + 1)) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def philox(counter: list[np.ndarray], key: int, rounds: int = 7) -> list[np.ndarray]:
    """Computes Philox. counter: four arrays of 32 bits, as uint64."""
    c, low = [np.asarray(word, np.uint64) for word in counter], np.uint64(0xFFFFFFFF)
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(rounds):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        c = [high_b ^ c[1] ^ np.uint64(k[0]), b & low, high_a ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def philox_words(first: np.ndarray, row: np.ndarray, key: int, stream: int) -> np.ndarray:
    """Returns the four words of each counter (first, row, stream), (..., 4)."""
    stream_bits = [np.full(row.shape, (stream >> shift) & 0xFFFFFFFF) for shift in (0, 32)]
    return np.stack(philox([first, row, *stream_bits], key), -1)


def random_bits(rows: int, cols: int, bits: int, key: int, stream: int, origin: tuple[int, int]):
    """Returns 16 random bits an element of (rows, cols), in the layout of cvt.rs."""
    r = np.arange(rows)[:, None] + origin[0]
    group = np.arange(-(-cols // 16))[None] + origin[1] // 16
    r, group = np.broadcast_arrays(r, group)
    drawn = philox_words(group, r, key, stream)  # (rows, groups, 4)
    w = [(drawn >> np.uint64(8 * i)) & np.uint64(255) for i in range(4)]
    reverse = [int(f"{i:08b}"[::-1], 2) for i in range(256)]
    v = [np.array(reverse, np.uint64)[w[3 - i].astype(np.int64)] for i in range(4)]
    lanes = [(w[2], w[0]), (v[3], v[1]), (w[3], w[1]), (v[2], v[0])]
    if bits == 8:
        lanes = [(w[1], w[0]), (v[3], v[2]), (w[3], w[2]), (v[1], v[0])]
    out = np.stack([high * np.uint64(256) + low for high, low in lanes], -1)
    return out.reshape(rows, -1)[:, :cols].astype(np.float64)


# ---- transform -----------------------------------------------------------------------------------


def hadamard(x: np.ndarray, points: int, signs: int | np.ndarray = SIGNS) -> np.ndarray:
    """Transforms x, fp32 (rows, cols), padded with zeros: fp32 butterflies, rounded to bf16.

    signs: a mask of 16 bits, repeated; or 1 and -1 of each point, (points).
    """
    v = np.pad(x, ((0, 0), (0, -x.shape[1] % points)))
    if isinstance(signs, int):
        signs = np.array([-1.0 if signs >> (i % 16) & 1 else 1.0 for i in range(points)])
    flip = signs.astype(F32)
    v = v.reshape(len(x), v.shape[1] // points, points) * flip
    stride = 1
    while stride < points:
        pairs = v.reshape(*v.shape[:2], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack([a + b, a - b], -2).reshape(v.shape)
        stride *= 2
    norm = {16: 0.25, 32: 0.25 * np.sqrt(0.5), 64: 0.125, 128: 0.125 * np.sqrt(0.5)}[points]
    return to_bf16(v * F32(norm)).reshape(len(x), -1)


# ---- scales --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parsed:
    elements: Format
    rule: str  # tensor row block mx nvfp4
    block: tuple[int, int]
    flags: tuple[str, ...]
    has_rows: bool = False  # each row has an amax of its own

    @property
    def points(self) -> int:
        if "eden" in self.flags:
            return 128
        rht = [flag for flag in self.flags if flag.startswith("rht")]
        return int(rht[0][3:] or 16) if rht else 0


def parse(spec: str) -> Parsed:
    head, *flags = spec.split("+")
    name, *rest = head.split("/")
    if name.startswith("mxfp"):
        elements = E2M1 if name == "mxfp4" else E5M2 if "e5m2" in rest else E4M3
        block = (32, 32) if "32x32" in rest else (1, 32)
        return Parsed(elements, "mx", block, tuple(flags))
    if rest == ["row"] and name == "nvfp4":
        return Parsed(E2M1, "nvfp4", (1, 16), tuple(flags), True)
    if name == "nvfp4":
        return Parsed(E2M1, "nvfp4", (16, 16) if rest else (1, 16), tuple(flags))
    if name == "e1m2":
        rows, cols = (int(size) for size in rest[0].split("x"))
        return Parsed(E1M2, "mx" if cols == 32 else "nvfp4", (rows, cols), tuple(flags))
    elements = E5M2 if name == "e5m2" else E4M3
    if rest[0] in ("tensor", "row"):
        return Parsed(elements, rest[0], (0, 0), tuple(flags), rest[0] == "row")
    rows, cols = rest[0].split("x")
    return Parsed(elements, "block", (int(rows), int(cols)), tuple(flags))


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Repeats a block's entry for each of its elements."""
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Finds amaxes by the bits of magnitudes, which order NaN above infinity."""
    rows, cols = block
    padded = np.pad(np.abs(x), ((0, -x.shape[0] % rows), (0, -x.shape[1] % cols)))
    shape = (padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    return padded.view(np.uint32).reshape(shape).max((1, 3)).view(F32)


def largest(x: np.ndarray, axis=None) -> np.ndarray:
    bits = np.abs(x).view(np.uint32)
    return np.asarray(bits.max(axis, initial=0)).astype(np.uint32).view(F32)


def fp8_factors(amax: np.ndarray, top: float, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns encode factors and scales."""
    encode = np.minimum(F32(top) / amax, FLT_MAX).astype(F32)
    if power_of_two:
        encode = (encode.view(np.uint32) & 0x7F800000).view(F32)
    encode = np.where(amax == 0, F32(1), encode)
    encode = np.where(np.isfinite(amax), encode, F32(np.nan)).astype(F32)
    return encode, F32(1) / encode


def mx_codes(amax: np.ndarray, fmt: Format, floor: bool) -> np.ndarray:
    bits = amax.view(np.uint32).astype(np.int64)
    max_bits = int(np.array(fmt.max, F32).view(np.uint32))
    e = (bits >> 23) - ((max_bits >> 23) - 127)
    if not floor:
        e += (bits & 0x7FFFFF) > (max_bits & 0x7FFFFF)
        if fmt.max < 2:  # of a denormal amax code 1 is the smallest one past max * 2^-127
            e = np.where(amax < F32(2.0**-126), amax.astype(np.float64) > fmt.max * 2.0**-127, e)
    return np.where(np.isfinite(amax), np.clip(e, 0, 254), 255).astype(np.uint8)


def nvfp4_scales(x, amax, block, flags, fmt):
    """Returns S and the codes of block scales."""
    pow2 = "pow2" in flags
    top = F32(fmt.max * (256 if pow2 else 448))
    s = F32(1) if amax == 0 else min(top / amax, FLT_MAX) if np.isfinite(amax) else F32(np.nan)
    s = F32(s)
    ratio = s * (F32(1) / F32(fmt.max))
    blocks = block_amax(x, block)
    v = np.minimum(blocks * ratio, FLT_MAX).astype(F32)
    if pow2:
        v = np.minimum(v, F32(256))
        mantissa, exponent = np.frexp(v)
        is_power = (mantissa == 0.5) | (v == 0) | np.isnan(v)
        v = np.where(is_power, v, np.ldexp(F32(1), exponent))
    codes = encode(v.astype(F32), E4M3, up=pow2 or "up" in flags)
    return s, np.where(np.isfinite(blocks), codes, 0x7F).astype(np.uint8)


def four_over_six_scales(x, amax, block, rows_are_columns: bool):
    """Returns S and the codes of block scales with the smaller squared error of two."""
    finite = np.isfinite(amax)
    s = F32(1) if amax == 0 else min(F32(1536) / amax, FLT_MAX) if finite else F32(np.nan)
    s = F32(s)
    blocks = block_amax(x, block)
    base = blocks / F32(6) * s
    found = []
    for v in (base, base * F32(1.5)):
        codes = encode(np.minimum(v, F32(448)).astype(F32), E4M3)
        codes = np.where(np.isfinite(blocks), codes, 0x7F).astype(np.uint8)
        scale = decode(codes, E4M3)
        factor = np.minimum(F32(1) / (scale * (F32(1) / s)), FLT_MAX).astype(F32)
        of_element = spread(scale, block, x.shape)
        values = decode(encode(x * spread(factor, block, x.shape), E2M1), E2M1)
        d = values * of_element * amax / F32(1536) - x
        found.append((codes, block_sums(d * d, block, rows_are_columns)))
    (six, error_six), (four, error_four) = found
    return s, np.where(error_four < error_six, four, six)


# ---- MS-EDEN -------------------------------------------------------------------------------------


def eden_signs(key: int, stream: int) -> np.ndarray:
    """Returns the signs of the transform, 1 and -1, (128)."""
    end = np.full(1, 0xFFFFFFFF)
    words = philox_words(end, end, key, stream & ~1 & MASK)[0]
    bits = (words[:, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)
    return 1.0 - 2.0 * bits.reshape(-1).astype(np.float64)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c in fp32, rounded once but for sums that need more than 64 bits."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(F32)


def eden_scales(y, amax):
    """Returns S, the codes of block scales before their correction, and the corrections.

    y: transformed, whole groups of 128 columns; the corrections: (rows, cols / 128).
    """
    finite = np.isfinite(amax)
    largest_code = F32(6 / (17 / 16 * 0.93))
    top = F32(256) * largest_code
    s = F32(F32(1) if amax == 0 else min(top / amax, FLT_MAX) if finite else np.nan)
    blocks = block_amax(y, (1, 16))
    v = np.minimum(blocks * (s * (F32(1) / largest_code)), FLT_MAX).astype(F32)
    codes = np.where(np.isfinite(blocks), encode(v, E4M3), 0x7F).astype(np.uint8)
    scale = decode(codes, E4M3)
    factor = np.minimum(F32(1) / (scale * (F32(1) / s)), FLT_MAX).astype(F32)

    elements = np.abs(y).reshape(len(y), -1, 16)
    t = (elements * (factor * F32(2**-6))[..., None]).astype(F32)
    q = decode(encode((elements * factor[..., None]).astype(F32), E2M1), E2M1) * F32(2**-6)
    squares = products = np.zeros(blocks.shape, F32)
    for i in range(16):
        squares = fused(t[..., i], t[..., i], squares)
        products = fused(t[..., i], q[..., i], products)
    sums = []
    for of_block in (squares, products):
        part = np.where(scale == 0, F32(0), scale * scale * of_block).astype(F32)
        part = part.reshape(len(y), -1, 8)
        while part.shape[2] > 1:
            half = part.shape[2] // 2
            part = part[..., :half] + part[..., half:]
        sums.append(part[..., 0])
    c = sums[0] / sums[1]
    return s, codes, np.where(np.isfinite(c), c, F32(1)).astype(F32)


def eden_stored(codes, corrections, key: int, stream: int, origin: tuple[int, int]) -> np.ndarray:
    """Returns the codes of the stored scales: the corrected ones, rounded stochastically."""
    corrected = decode(codes, E4M3) * np.repeat(corrections, 8, 1)
    r = np.arange(len(codes))[:, None] + origin[0]
    group = np.arange(corrections.shape[1])[None] + origin[1] // 128
    words = philox_words(*np.broadcast_arrays(group, r), key, stream)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1)
    random = halves.reshape(corrected.shape).astype(np.float64)
    return encode(corrected.astype(F32), E4M3, random)


def block_sums(squares: np.ndarray, block: tuple[int, int], rows_are_columns: bool) -> np.ndarray:
    """Sums in fp32: along a row in order, and over the 16 rows of a 2D block in a tree."""
    height, width = block
    padded = np.pad(squares, ((0, -squares.shape[0] % height), (0, -squares.shape[1] % width)))
    shape = (padded.shape[0] // height, height, padded.shape[1] // width, width)
    parts = padded.astype(F32).reshape(shape).transpose(0, 2, 1, 3)
    if rows_are_columns and height > 1:
        parts = parts.swapaxes(2, 3)
    lines = np.zeros(parts.shape[:3], F32)
    for i in range(parts.shape[3]):
        lines = lines + parts[..., i]
    while lines.shape[2] > 1:
        half = lines.shape[2] // 2
        lines = lines[..., :half] + lines[..., half:]
    return lines[..., 0]


# ---- the cast ------------------------------------------------------------------------------------


def pack(codes: np.ndarray) -> np.ndarray:
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return even[:, 0::2] | (even[:, 1::2] << 4)


def quantize(
    x, spec: str, given_amax=None, key: int = 0, stream: int = 0, origin=(0, 0), columnwise=False
):
    """Casts x, fp32 (rows, cols) as read, to codes, scale bytes or fp32, and amax or None."""
    p = parse(spec)
    with np.errstate(all="ignore"):
        if p.points:
            signs = eden_signs(key, stream) if "eden" in p.flags else SIGNS
            x = hadamard(x, p.points, signs)
        shape = x.shape
        amax = scale = factor = None
        zero = np.zeros(shape, bool)
        if p.rule == "tensor":
            amax = largest(x) if given_amax is None else np.asarray(given_amax, F32)
            factor, scale = fp8_factors(amax, p.elements.max, False)
            factor = np.broadcast_to(factor, shape)
        elif p.rule == "row":
            amax = largest(x, 1) if given_amax is None else np.asarray(given_amax, F32)
            factor, scale = fp8_factors(amax, p.elements.max, "exact" not in p.flags)
            factor = np.broadcast_to(factor[:, None], shape)
        elif p.rule == "block":
            power_of_two = "exact" not in p.flags
            factor, scale = fp8_factors(block_amax(x, p.block), p.elements.max, power_of_two)
            factor = spread(factor, p.block, shape)
        elif p.rule == "mx":
            scale = mx_codes(block_amax(x, p.block), p.elements, "floor" in p.flags)
            inverse = np.ldexp(F32(1), 127 - scale.astype(np.int32))
            factor = spread(np.where(scale == 255, F32(np.nan), inverse), p.block, shape)
        else:
            amax = largest(x, 1 if p.has_rows else None)
            amax = amax if given_amax is None else np.asarray(given_amax, F32)
            corrections = None
            if "eden" in p.flags:
                s, scale, corrections = eden_scales(x, amax)
            elif "4over6" in p.flags:
                s, scale = four_over_six_scales(x, amax, p.block, columnwise and not p.points)
            elif p.has_rows:
                empty = np.zeros((0, -(-shape[1] // 16)), np.uint8)
                rows = [
                    nvfp4_scales(x[i : i + 1], a, p.block, p.flags, p.elements)
                    for i, a in enumerate(amax)
                ]
                s = np.array([row[0] for row in rows], F32).reshape(-1, 1)
                scale = np.concatenate([empty, *(row[1] for row in rows)])
            else:
                s, scale = nvfp4_scales(x, amax, p.block, p.flags, p.elements)
            block = decode(scale, E4M3)
            enc = np.minimum(F32(1) / (block * (F32(1) / s)), FLT_MAX)
            if corrections is not None:
                scale = eden_stored(scale, corrections, key, stream, origin)
                block = decode(scale, E4M3)
            factor, zero = (spread(t, p.block, shape) for t in (enc, block == 0))
        random = None
        if "sr" in p.flags:
            random = random_bits(*shape, p.elements.bits, key, stream, origin)
        v = (x * factor).astype(F32)
        codes = np.where(zero, 0, encode(v, p.elements, random)).astype(np.uint8)
        if "delayed" in p.flags:
            codes = np.where(np.isinf(x), p.elements.nan_code, codes)
            amax = largest(x)
    return pack(codes) if p.elements.bits == 4 else codes, scale, amax
