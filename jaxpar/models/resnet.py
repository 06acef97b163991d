"""ResNet (He et al. 2015) with group normalization (Wu & He 2018), so that examples do not share statistics.

ResNet-50 has the stride in the 3x3 convolution ("v1.5"). For small images, the stem is that of the CIFAR experiments
in the paper (section 4.2): one 3x3 convolution without pooling.

Array dims: B examples, H height, W width, C channels (in logits: classes).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.models.layers import class_logits, dropout
from jaxpar.models.mlp import unit_range
from jaxpar.models.model import Context, Model
from jaxpar.models.options import check_task, pick

# hidden_size: channels of the first stage; each later stage doubles the channels.
SIZES = {"18": {"hidden_size": 64}, "50": {"hidden_size": 64}}
DEFAULTS = {"dropout": 0.0}
BLOCKS = {"18": (2, 2, 2, 2), "50": (3, 4, 6, 3)}  # blocks in each stage
GROUPS = 32
SMALL_IMAGE = 64  # largest height and width at which the stem keeps the resolution


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers stem, block_0 to the last block, head. Outputs logits [B, C], float32."""
    check_task(config, info, heads=("example",), kinds=("image",))
    values = pick(config, SIZES, DEFAULTS)
    width, dtype = values["hidden_size"], jnp.dtype(config.model.dtype)
    if width % GROUPS:
        what = f"{GROUPS}, the number of groups of its norms"
        raise UserError(f"config.model.hidden_size is {width}; for resnet it must be a multiple of {what}")
    height, image_width, channels = info.input_shape
    small = max(height, image_width) <= SMALL_IMAGE
    bottleneck = config.model.size == "50"
    makers: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {"stem": partial(Stem, channels, width, small, dtype)}
    num_in = width
    for stage, count in enumerate(BLOCKS[config.model.size]):
        inner = width * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            makers[f"block_{len(makers) - 1}"] = partial(ResidualBlock, num_in, inner, stride, bottleneck, dtype)
            num_in = 4 * inner if bottleneck else inner
    makers["head"] = partial(ResNetHead, num_in, info.num_outputs, values["dropout"], dtype)
    return Model(makers, scan=config.model.scan_layers, remat=config.model.remat)


def conv(num_in: int, num_out: int, size: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Conv:
    """Return a square convolution with equal padding on all sides and He initialization for ReLU, by fan-out."""
    padding, init = [(size // 2, size // 2)] * 2, nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nnx.Conv(
        num_in, num_out, (size, size), stride, padding=padding, use_bias=False, dtype=dtype, kernel_init=init, rngs=rngs
    )


def group_norm(channels: int, rngs: nnx.Rngs, *, scale: float = 1.0) -> nnx.GroupNorm:
    """Return a group norm with initial scale `scale`; apply it with `normalize_groups`."""
    return nnx.GroupNorm(channels, num_groups=GROUPS, scale_init=nnx.initializers.constant(scale), rngs=rngs)


def normalize_groups(norm: nnx.GroupNorm, x_BHWC: jax.Array) -> jax.Array:
    """Apply a norm in float32, and return the result in the dtype of x.

    In 16 bits, only the inputs are saved for the backward pass, also inside a `jax.checkpoint` whose policy saves more.
    In float32, arrays of several operations are saved, which takes less time.
    """
    graphdef, weights = nnx.split(norm)

    def apply(weights: Any, x: jax.Array) -> jax.Array:
        y: jax.Array = nnx.merge(graphdef, weights)(x.astype(jnp.float32))
        return y.astype(x.dtype)

    def backward(inputs: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
        apart = jax.tree.map(jax.lax.optimization_barrier, inputs)  # else XLA may keep the values of the forward pass
        grads: tuple[Any, ...] = jax.vjp(apply, *apart)[1](slope)
        return grads

    if x_BHWC.dtype == jnp.float32:
        return apply(weights, x_BHWC)
    computed = jax.custom_vjp(apply)
    computed.defvjp(lambda *inputs: (apply(*inputs), inputs), backward)
    return computed(weights, x_BHWC)


class Stem(nnx.Module):
    """The first convolution, uint8 [B, H, W, C] -> [B, H', W', C']: to a quarter of the size if images are large."""

    def __init__(self, channels: int, width: int, small: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.small, self.dtype = small, dtype
        self.conv = conv(channels, width, 3 if small else 7, 1 if small else 2, dtype, rngs)
        self.norm = group_norm(width, rngs)

    def __call__(self, pixels_BHWC: jax.Array, context: Context) -> jax.Array:
        x_BHWC = jax.nn.relu(normalize_groups(self.norm, self.conv(unit_range(pixels_BHWC, self.dtype))))
        if self.small:
            return x_BHWC
        return nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class ResidualBlock(nnx.Module):
    """A residual block of 3x3 and 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 to four times the channels.

    [B, H, W, C] -> [B, H / stride, W / stride, C']. The scale of the last norm is initialized to zero, so that the
    residual branch starts as zero (Goyal et al. 2017, section 5.1).
    """

    def __init__(self, num_in: int, inner: int, stride: int, bottleneck: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        num_out = 4 * inner if bottleneck else inner
        shapes = [(num_in, inner, 3, stride), (inner, inner, 3, 1)]
        if bottleneck:
            shapes = [(num_in, inner, 1, 1), (inner, inner, 3, stride), (inner, num_out, 1, 1)]
        self.convs = nnx.List([conv(*shape, dtype, rngs) for shape in shapes])
        last = len(shapes) - 1
        self.norms = nnx.List([group_norm(shape[1], rngs, scale=float(i != last)) for i, shape in enumerate(shapes)])
        self.projects = stride != 1 or num_in != num_out
        if self.projects:
            self.projection = conv(num_in, num_out, 1, stride, dtype, rngs)
            self.projection_norm = group_norm(num_out, rngs)

    def __call__(self, x_BHWC: jax.Array, context: Context) -> jax.Array:
        y_BHWC = x_BHWC
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y_BHWC = normalize_groups(norm, conv(jax.nn.relu(y_BHWC) if index else y_BHWC))
        if self.projects:
            x_BHWC = normalize_groups(self.projection_norm, self.projection(x_BHWC))
        return jax.nn.relu(x_BHWC + y_BHWC)


class ResNetHead(nnx.Module):
    """The mean over the image in float32, then a linear map to the classes: [B, H, W, C] -> [B, classes], float32."""

    def __init__(self, num_in: int, num_classes: int, rate: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.rate = rate
        self.classifier = nnx.Linear(num_in, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, context: Context) -> jax.Array:
        x_BC = x_BHWC.astype(jnp.float32).mean(axis=(1, 2))
        return class_logits(self.classifier, dropout(x_BC, self.rate, context, 0))
