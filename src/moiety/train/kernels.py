"""Triton kernels for stacked models: convolutions, pooling and random numbers of S copies at once.

cuDNN runs S small convolutions with different weights as one grouped convolution, which it does
several times slower than one after another. Here a program belongs to one copy: a tile of output
positions is the product of that copy's weights with the pixels under them. Without padding (it is
added before) the pixel under a weight lies at (place of the position) + (place of the weight), so
that a tile of pixels is read where they are, with one addition for each. Reading is what costs:
SPAN neighbours in a row share one window, a little wider, whose weights are shifted copies of one
another with zeros around, and the pixels of a window are read once for all of them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024
# Measured on an H200: positions and weights of a tile, warps, stages (and images of a part).
FORWARD = {"M": 128, "K": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {"M": 128, "K": 128, "num_warps": 4, "num_stages": 1}
IMAGES = 32
WIDEST = 256  # weights of a tile, if its channels alone are not more: twice of it takes the memory


@triton.jit
def _places(m, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
            ROWS: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Where the first pixel under each window lies."""
    image, row, span = m // (ROWS * SPANS), m // SPANS % ROWS, m % SPANS
    return (image * CHANNELS * HEIGHT + row) * WIDTH + span * SPAN


@triton.jit
def _offsets(k, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
             SIZE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """How far from there the pixel under each weight lies; 0 past the last weight."""
    channel, row, column = k // (SIZE * WIDE), k // WIDE % SIZE, k % WIDE
    return tl.where(k < DEPTH, (channel * HEIGHT + row) * WIDTH + column, 0)


@triton.jit
def _outputs(m, n, AREA: tl.constexpr, OUT: tl.constexpr, SPAN: tl.constexpr):
    """Where the output of window m and weights n = (neighbour, channel) lies."""
    first = m * SPAN
    image, position = first // AREA, first % AREA
    return (image * OUT * AREA + position)[None, :] + (n % OUT * AREA + n // OUT)[:, None]


@triton.jit
def _convolve(
    x, weight, bias, y, images,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    OUT: tl.constexpr, SPAN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEIGHT - SIZE + 1
    COLUMNS: tl.constexpr = WIDTH - SIZE + 1
    WIDE: tl.constexpr = SIZE + SPAN - 1
    DEPTH: tl.constexpr = CHANNELS * SIZE * WIDE
    copy = tl.program_id(1).to(tl.int64)
    x += copy * images * CHANNELS * HEIGHT * WIDTH
    weight += copy * SPAN * OUT * DEPTH
    n = tl.arange(0, N)
    m = tl.program_id(0) * M + tl.arange(0, M)
    here = m < images * ROWS * COLUMNS // SPAN
    place = _places(tl.where(here, m, 0), HEIGHT, WIDTH, CHANNELS, ROWS, COLUMNS // SPAN, SPAN)
    total = tl.zeros([N, M], tl.float32)
    for start in range(0, DEPTH, K):
        k = start + tl.arange(0, K)
        offset = _offsets(k, HEIGHT, WIDTH, DEPTH, SIZE, WIDE)
        pixels = tl.load(x + (offset[:, None] + place[None, :]))
        inside = (n[:, None] < SPAN * OUT) & (k[None, :] < DEPTH)
        w = tl.load(weight + n[:, None] * DEPTH + k[None, :], mask=inside, other=0.0)
        total = tl.dot(w, pixels, total, input_precision=PRECISION)
    real = n < SPAN * OUT
    if BIAS:
        total += tl.load(bias + copy * OUT + n % OUT, mask=real, other=0.0)[:, None]
    at = copy * images * OUT * ROWS * COLUMNS + _outputs(m, n, ROWS * COLUMNS, OUT, SPAN)
    tl.store(y + at, total, mask=real[:, None] & here[None, :])


@triton.jit
def _gradient(
    x, g, parts, images,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    OUT: tl.constexpr, SPAN: tl.constexpr, PER_PART: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEIGHT - SIZE + 1
    COLUMNS: tl.constexpr = WIDTH - SIZE + 1
    WIDE: tl.constexpr = SIZE + SPAN - 1
    DEPTH: tl.constexpr = CHANNELS * SIZE * WIDE
    WINDOWS: tl.constexpr = ROWS * COLUMNS // SPAN  # of one image
    copy, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    x += copy * images * CHANNELS * HEIGHT * WIDTH
    g += copy * images * OUT * ROWS * COLUMNS
    n = tl.arange(0, N)
    real = n < SPAN * OUT
    k = tl.program_id(0) * K + tl.arange(0, K)
    offset = _offsets(k, HEIGHT, WIDTH, DEPTH, SIZE, WIDE)
    last = tl.minimum((part + 1) * PER_PART, images) * WINDOWS
    total = tl.zeros([N, K], tl.float32)
    for start in range(part * PER_PART * WINDOWS, last, M):
        m = start + tl.arange(0, M)
        here = m < last
        place = _places(tl.where(here, m, 0), HEIGHT, WIDTH, CHANNELS, ROWS, COLUMNS // SPAN, SPAN)
        pixels = tl.load(x + (offset[:, None] + place[None, :]))
        at = _outputs(m, n, ROWS * COLUMNS, OUT, SPAN)
        slope = tl.load(g + at, mask=real[:, None] & here[None, :], other=0.0)
        total = tl.dot(slope, tl.trans(pixels), total, input_precision=PRECISION)
    row = (part * tl.num_programs(1) + copy) * SPAN * OUT + n
    inside = real[:, None] & (k[None, :] < DEPTH)
    tl.store(parts + row[:, None] * DEPTH + k[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["number"])
def _draw(out, seed, step, number, p, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    copy, place = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    now = zero + tl.load(step).to(tl.uint32)
    draw = zero + number.to(tl.uint32)
    a, b, _, _ = tl.philox(tl.load(seed + copy), place.to(tl.uint32), now, draw, zero)
    value = tl.uint_to_uniform_float(a)
    if KIND == "normal":
        value, _ = tl.pair_uniform_to_normal(value, tl.uint_to_uniform_float(b))
    if KIND == "bernoulli":
        value = (value < p).to(tl.float32)
    tl.store(out + copy.to(tl.int64) * size + place, value, mask=place < size)


@triton.jit
def _pool(
    x, y, choice, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEIGHT // SIZE
    COLUMNS: tl.constexpr = WIDTH // SIZE
    program = tl.program_id(0)
    if LARGE:  # 64 bits where they are needed: divisions are what costs here
        program = program.to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    place, inner = at // INNER, at % INNER
    plane, row, column = place // (ROWS * COLUMNS), place // COLUMNS % ROWS, place % COLUMNS
    corner = x + (((plane * HEIGHT + row * SIZE) * WIDTH + column * SIZE) * INNER + inner)
    best = tl.load(corner, mask=here, other=0.0)
    which = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            value = tl.load(corner + (i * WIDTH + j) * INNER, mask=here, other=0.0)
            more = (value > best) | (value != value)  # NaN wins, as in torch
            best, which = tl.where(more, value, best), tl.where(more, i * SIZE + j, which)
    tl.store(y + at, best, mask=here)
    tl.store(choice + at, which.to(tl.uint8), mask=here)


@triton.jit
def _unpool(
    g, choice, gx, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEIGHT // SIZE
    COLUMNS: tl.constexpr = WIDTH // SIZE
    program = tl.program_id(0)
    if LARGE:  # 64 bits where they are needed: divisions are what costs here
        program = program.to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    place, inner = at // INNER, at % INNER
    plane, row, column = place // (HEIGHT * WIDTH), place // WIDTH % HEIGHT, place % WIDTH
    pooled = here & (row < ROWS * SIZE) & (column < COLUMNS * SIZE)
    source = ((plane * ROWS + row // SIZE) * COLUMNS + column // SIZE) * INNER + inner
    which = tl.load(choice + source, mask=pooled, other=255).to(tl.int32)
    value = tl.load(g + source, mask=pooled, other=0.0)
    mine = which == row % SIZE * SIZE + column % SIZE
    tl.store(gx + at, tl.where(mine, value, 0.0), mask=here)


def convolve(x_SBCHW: Tensor, weight_SOCKK: Tensor, bias_SO: Tensor | None, padding: int) -> Tensor:
    """S square convolutions of stride 1, each with weights of its own."""
    x = _padded(x_SBCHW, padding)
    copies, images, channels, height, width = x.shape
    out, size = weight_SOCKK.shape[1], weight_SOCKK.shape[-1]
    y = x.new_empty(copies, images, out, height - size + 1, width - size + 1)
    span = _span(channels, size, out, y.shape[-1])
    windows = images * y.shape[-2] * y.shape[-1] // span
    shifted = [F.pad(weight_SOCKK, (p, span - 1 - p)) for p in range(span)]
    weight = torch.stack(shifted, dim=1)  # [S, SPAN, O, C, K, K + SPAN - 1]
    _convolve[(triton.cdiv(windows, FORWARD["M"]), copies)](
        x, weight, weight if bias_SO is None else bias_SO.contiguous(), y, images,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, SIZE=size, OUT=out, SPAN=span,
        BIAS=bias_SO is not None, PRECISION=_precision(), N=_tile(span * out), **FORWARD,
    )  # fmt: skip
    return y


def convolve_gradients(
    x_SBCHW: Tensor, g_SBOHW: Tensor, size: int, padding: int
) -> tuple[Tensor, Tensor]:
    """The gradients of weights and bias; parts of the batch are added in fixed order."""
    x, g = _padded(x_SBCHW, padding), g_SBOHW.contiguous()
    copies, images, channels, height, width = x.shape
    out, parts = g.shape[2], triton.cdiv(images, IMAGES)
    span = _span(channels, size, out, g.shape[-1])
    depth = channels * size * (size + span - 1)
    weight = x.new_empty(parts, copies, span, out, channels, size, size + span - 1)
    tile = min(_tile(depth), BACKWARD["K"])
    _gradient[(triton.cdiv(depth, tile), copies, parts)](
        x, g, weight, images,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, SIZE=size, OUT=out, SPAN=span,
        PER_PART=IMAGES, PRECISION=_precision(), N=_tile(span * out), **{**BACKWARD, "K": tile},
    )  # fmt: skip
    shifted = weight.sum(0).unbind(1)
    unshifted = [t[..., p : p + size] for p, t in enumerate(shifted)]
    return torch.stack(unshifted).sum(0), g.sum((1, 3, 4))


def _span(channels: int, size: int, out: int, columns: int) -> int:
    """How many neighbours share a window: the pixels read for an output against padded products."""

    def cost(span: int) -> float:
        depth = -(-channels * size * (size + span - 1) // 32) * 32
        return depth / span * (1 + _tile(span * out) / 64)

    fit = (s for s in range(1, 9) if columns % s == 0 and (s == 1 or _tile(s * out) <= WIDEST))
    return min(fit, key=cost)


def pool(x_NHWI: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest of each `size` × `size` square, and which of them it was."""
    images, height, width, inner = x_NHWI.shape
    y = x_NHWI.new_empty(images, height // size, width // size, inner)
    choice = torch.empty_like(y, dtype=torch.uint8)
    grid = (triton.cdiv(y.numel(), BLOCK),)
    _pool[grid](x_NHWI, y, choice, y.numel(), **_squares(x_NHWI, size))
    return y, choice


def unpool(g_NHWI: Tensor, choice: Tensor, size: int, shape: torch.Size) -> Tensor:
    """The gradient of `pool`."""
    gx = g_NHWI.new_empty(shape)
    grid = (triton.cdiv(gx.numel(), BLOCK),)
    _unpool[grid](g_NHWI, choice, gx, gx.numel(), **_squares(gx, size))
    return gx


def draw(
    seed_S: Tensor, step: Tensor, number: int, kind: str, p: float, shape: tuple[int, ...]
) -> Tensor:
    """Random float32 `[S, *shape]` of each copy's own; `number` says which draw of the step."""
    out = torch.empty(len(seed_S), *shape, device=seed_S.device)
    size = out[0].numel()
    if size:
        grid = (triton.cdiv(size, BLOCK), len(seed_S))
        _draw[grid](out, seed_S, step, number, p, size, KIND=kind, BLOCK=BLOCK)
    return out


def _squares(x: Tensor, size: int) -> dict[str, int]:
    shape = {"HEIGHT": x.shape[1], "WIDTH": x.shape[2], "INNER": x.shape[3], "SIZE": size}
    return {**shape, "BLOCK": BLOCK, "LARGE": x.numel() + BLOCK >= 2**31}


def _padded(x: Tensor, padding: int) -> Tensor:
    return F.pad(x, [padding] * 4) if padding else x.contiguous()


def _tile(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _precision() -> str:
    # As torch would have run the convolution: TF32 unless the user forbids it.
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
