"""A model is an ordered sequence of single-device layers: each is an `nnx.Module` called as `layer(x, context)`.

Strategies partition the sequence: a pipeline stage is a range of layers. Parameters are a plain dict keyed by layer
name. This canonical form is independent of the strategy and of any scan over layers.

Array dims: B examples, T positions, D features.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.layout import Tree
from jaxpar.models.attention import KeyValueCache
from jaxpar.models.group import DeviceGroup, TensorSplit
from jaxpar.models.makers import GraphDef, LayerMaker, LayerParams, abstract_layer, fresh_params
from jaxpar.models.remat import REMAT_POLICIES, is_computed
from jaxpar.tasks.token_logits import TokenLogits, whole

Params = dict[str, LayerParams]  # by layer name
Index = int | jax.Array  # index of a layer
Activations = Tree  # the values between layers: an array or any pytree of arrays
Batch = Mapping[str, jax.Array]  # see jaxpar.data for the keys
Kind = TypeVar("Kind", bound="Model")


class Context(NamedTuple):
    """Values that a layer can read besides its input."""

    batch: Batch  # every pipeline stage has it, so masks are not sent between stages
    keys_B: jax.Array | None  # dropout keys of this layer and step, one per example; None in evaluation
    cache: KeyValueCache | None = None  # the earlier positions of the texts, if the input continues them
    group: DeviceGroup | None = None  # the devices that compute the layer together; None: this one alone

    def at(self, index: Index) -> "Context":
        """Return the context with the dropout keys of the layer, or the application of a layer, at this index."""
        if self.keys_B is None:
            return self
        return self._replace(keys_B=jax.vmap(jax.random.fold_in, (0, None))(self.keys_B, index))


class Tie(NamedTuple):
    """The array `name` of layer `layer` is the array `source_name` of layer `source`. Only the source is stored."""

    layer: str
    name: str
    source: str
    source_name: str


class Layer(NamedTuple):
    """One layer of a model."""

    name: str
    graphdef: GraphDef  # its structure, without arrays
    shapes: LayerParams
    num_applications: int  # how often it is applied, one after another

    def apply(self, weights: LayerParams, x: Activations, context: Context) -> Activations:
        """Return the output of one application."""
        return nnx.merge(self.graphdef, weights)(x, context)


class Model:
    """An ordered sequence of layers. `jaxpar.models.build` creates one from a config."""

    def __init__(
        self,
        makers: Mapping[str, LayerMaker],
        *,
        ties: tuple[Tie, ...] = (),
        applications: Mapping[str, int] | None = None,
        scan: bool = False,
        remat: str = "none",
        tensor: TensorSplit | None = None,
    ):
        """Create the model from functions that create its layers.

        Args:
          makers: layer name -> function that creates the layer, in order. Equal layers should share one function: they
            are then traced and initialized together.
          ties: arrays that two layers share.
          applications: layer name -> number of times that the layer is applied, one after another, with the same
            parameters (Lan et al., "ALBERT", 2020); by default 1.
          scan: whether to compute a run of identical layers with one `lax.scan`.
          remat: none, full or dots: which values the backward pass recomputes in each layer.
          tensor: how a group of devices divides the arrays; None: the layers compute on one device only.
        """
        self._makers, self._scan, self.remat, self.tensor = dict(makers), scan, remat, tensor
        self._group: DeviceGroup | None = None
        self._change: Callable[[Tree, Index], Tree] | None = None
        self._is_untied = False
        self.ties = ties
        different = {id(make): make for make in self._makers.values()}
        abstract = {key: abstract_layer(make) for key, make in different.items()}
        times = applications or {}
        self.layers = tuple(Layer(name, *abstract[id(make)], times.get(name, 1)) for name, make in self._makers.items())
        # indices of consecutive layers with the same definition and shapes, which one scan can compute
        self.runs = tuple(self._find_runs())
        self._read_dtypes: dict[Any, Tree] = {}  # of layers for inputs of these shapes
        self._inputs: dict[Any, list[Activations]] = {}  # of all layers for batches of these shapes

    def as_kind(self, kind: type[Kind], **attributes: Any) -> Kind:
        """Return the same model as one of a subclass, with values of these attributes."""
        model = kind.__new__(kind)
        vars(model).update(vars(self) | attributes)
        return model

    def _with(self, **attributes: Any) -> "Model":
        """Return the same model with other values of these attributes."""
        return self.as_kind(type(self), **attributes)

    def unrolled(self) -> "Model":
        """Return the same model, computed without a scan."""
        return self._with(_scan=False)

    @property
    def scanned(self) -> list[str]:
        """The names of the layers that are computed by a scan."""
        runs = [run for run in self.runs if self._scan and len(run) > 1]
        return [layer.name for run in runs for layer in self.layers[run.start : run.stop]]

    def with_remat(self, remat: str) -> "Model":
        """Return the same model with another kind of rematerialization: none, full or dots."""
        return self._with(remat=remat)

    def with_changes(self, change: Callable[[Tree, Index], Tree]) -> "Model":
        """Return the same model with change(x, i) as the input of layer i, and as the output of the last one."""
        return self._with(_change=change)

    def untied(self) -> "Model":
        """Return the same model, whose gradient lacks that of shared arrays in the layers that do not own them."""
        return self._with(_is_untied=True)

    def shortened(self, depth: int) -> "Model":
        """Return the model with the first `depth` layers of its longest run."""
        longest = max(self.runs, key=len)
        layers = self.layers[: longest.start + depth] + self.layers[longest.stop :]
        makers = {layer.name: self._makers[layer.name] for layer in layers}
        model = self._with(layers=layers, _makers=makers, _read_dtypes={}, _inputs={})
        model.runs = tuple(model._find_runs())
        return model

    def in_group(self, group: DeviceGroup, shapes: Params) -> "Model":
        """Return the same model, computed by a group of devices. shapes: of the arrays that a device has."""
        shapes = {layer.name: {**layer.shapes, **shapes[layer.name]} for layer in self.layers}
        for tie in self.ties:
            shapes[tie.layer][tie.name] = shapes[tie.source][tie.source_name]
        layers = tuple(layer._replace(shapes=shapes[layer.name]) for layer in self.layers)
        return self._with(layers=layers, _group=group, _read_dtypes={}, _inputs={})

    @property
    def shapes(self) -> Params:
        """The shapes and dtypes of the parameters that `init` returns."""
        tied = {(tie.layer, tie.name) for tie in self.ties}
        return {
            layer.name: {name: leaf for name, leaf in layer.shapes.items() if (layer.name, name) not in tied}
            for layer in self.layers
        }

    def init(self, key: jax.Array) -> Params:
        """Return initial parameters. Layer i uses fold_in(key, i), so its values depend only on the key and i."""
        return self.init_layers(key, 0, len(self.layers))

    def init_layers(
        self,
        key: jax.Array,
        start: int,
        stop: int,
        *,
        shift: Index = 0,
        part: Callable[[Params], Params] | None = None,
    ) -> Params:
        """Return initial parameters of layers[start:stop], with the random keys of the layers at index + shift.

        part: returns what a device keeps of the parameters of a layer, of which it then has one at a time.
        """
        params: Params = {}
        # Consecutive layers with the same maker are initialized by one vmap: it compiles once, with the same numbers.
        makers = list(self._makers.items())[start:stop]
        for _, group in itertools.groupby(makers, lambda item: id(item[1])):
            names, same = zip(*group, strict=True)
            indices = jnp.arange(len(names)) + (start + len(params)) + shift
            keys = jax.vmap(partial(jax.random.fold_in, key))(indices)
            if part is None:
                stacked = jax.vmap(partial(fresh_params, same[0]))(keys)
            else:
                name, keep = names[0], part
                stacked = jax.lax.map(lambda key: keep({name: fresh_params(same[0], key)})[name], keys)  # noqa: B023 - called
            params |= {name: jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i, name in enumerate(names)}
        for tie in self.ties:
            if tie.layer in params:
                del params[tie.layer][tie.name]
        return params

    def apply(self, params: Params, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Return the output of the last layer as one array. Arguments: see `outputs`."""
        return whole(self.outputs(params, batch, keys_B))

    def outputs(self, params: Params, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array | TokenLogits:
        """Return the output of the last layer in the form from which a task computes its sums.

        The batch's "inputs" are the input of the first layer. keys_B: one dropout key per example; None: no dropout.
        """
        outputs = self.apply_layers(params, batch["inputs"], batch, keys_B, 0, len(self.layers))
        return self._changed(outputs, len(self.layers))

    def apply_layers(
        self,
        params: Params,
        x: Activations,
        batch: Batch,
        keys_B: jax.Array | None,
        start: int,
        stop: int,
        *,
        shift: Index = 0,
        scan: bool = True,
    ) -> Activations:
        """Return the output of layers[start:stop] (such as a pipeline stage) for the input x of layer `start`.

        shift: offset of the layer index for dropout masks, so that equal stages can share one program. scan: if False,
        do not scan, even if the model was created with scan=True.
        """
        context, scan = Context(batch, keys_B, group=self._group), scan and self._scan
        for run in self.runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if scan and last - first > 1:
                with jax.named_scope(f"{self.layers[first].name}-{self.layers[last - 1].name}"):
                    x = self._scan_run(params, x, context, first, last, shift)
                continue
            for index in range(first, last):
                layer = self.layers[index]
                weights = self.with_ties(params, layer.name)
                with jax.named_scope(layer.name):
                    x = self._call(layer, weights, x, context, index + shift, scan=scan)
        return x

    def extend(self, params: Params, tokens_BT: jax.Array, cache: KeyValueCache) -> Activations:
        """Return the input of the last layer for tokens [B, T] that continue the texts in `cache`, and extend it.

        The layers must read their positions and earlier keys and values from `Context.cache`, as those of GPT do.
        """
        x: Activations = tokens_BT
        for layer in self.layers[:-1]:
            weights = self.with_ties(params, layer.name)
            for _ in range(layer.num_applications):
                x = layer.apply(weights, x, Context({"inputs": tokens_BT}, None, cache, self._group))
        return x

    def last(self, params: Params, x: jax.Array) -> jax.Array:
        """Return the output of the last layer for its input x [B, T, D], as one array."""
        layer = self.layers[-1]
        inputs = {"inputs": x[..., 0]}  # of which a group reads the number of positions
        return whole(layer.apply(self.with_ties(params, layer.name), x, Context(inputs, None, group=self._group)))

    def inputs(self, batch: Batch) -> list[Activations]:
        """Return the shapes and dtypes of the input of each layer for an abstract batch, as `jax.ShapeDtypeStruct`s.

        In a group, they are those without one: of all positions.
        """
        key = tuple(sorted((name, x.shape, str(x.dtype)) for name, x in batch.items()))
        if key not in self._inputs:
            x, before, alone = jax.eval_shape(lambda x: x, batch["inputs"]), None, self._with(_group=None)
            inputs, shapes, starts = [x], self.shapes, {run.start for run in self.runs}
            for index in range(len(self.layers) - 1):
                if index in starts or x != before:  # otherwise an equal layer with an equal input has an equal output
                    apply = partial(alone.apply_layers, keys_B=None, start=index, stop=index + 1)
                    x, before = jax.eval_shape(apply, shapes, x, dict(batch)), x
                inputs.append(x)
            self._inputs[key] = inputs
        return list(self._inputs[key])

    def read_shapes(self, batch: Batch, *, in_training: bool = True) -> Params:
        """Return the shapes of the arrays that each layer uses, with the dtypes in which it reads them.

        These are narrower if all that a layer does with an array is to cast it. They include shared arrays.
        """
        inputs, keys_B = zip(self.layers, self.inputs(batch), strict=True), None
        if in_training:
            keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(batch["inputs"])))
        return {layer.name: self.shapes_read(layer, x, batch, keys_B) for layer, x in inputs}

    def narrowed_shapes(self, batch: Batch, *, in_training: bool = True) -> Params:
        """Return `shapes` with the dtypes in which layers read the arrays, except of those that they share.

        The gradients of a shared array are added up in its own dtype.
        """
        read = self.read_shapes(batch, in_training=in_training)
        tied = {(tie.source, tie.source_name) for tie in self.ties}
        return {
            name: {key: leaf if (name, key) in tied else read[name][key] for key, leaf in layer.items()}
            for name, layer in self.shapes.items()
        }

    def as_stored(self, tree: Params) -> Params:
        """Return the arrays of some layers in the dtypes of `shapes`."""
        return {
            name: jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), layer, self.shapes[name])
            for name, layer in tree.items()
        }

    def shapes_read(self, layer: Layer, x: Activations, batch: Batch, keys_B: jax.Array | None) -> LayerParams:
        """Return `read_shapes` of one layer, for its input x."""
        if layer.num_applications > 1:  # its gradients are added up over the applications
            return layer.shapes
        if self._group is not None:  # the dtypes are those without one, for all positions
            x = self.inputs(batch)[[one.name for one in self.layers].index(layer.name)]
        inputs = jax.eval_shape(lambda *values: values, x, Context(dict(batch), keys_B))
        avals = jax.tree.leaves((inputs, layer.shapes))
        # Layers of one maker share the structure, which cannot always be hashed.
        key = (id(layer.graphdef), keys_B is None, *((leaf.shape, leaf.dtype) for leaf in avals))
        if key not in self._read_dtypes:
            self._read_dtypes[key] = read_dtypes(layer.apply, layer.shapes, *inputs)
        dtypes = self._read_dtypes[key]
        return jax.tree.map(lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype), layer.shapes, dtypes)

    def _scan_run(
        self, params: Params, x: Activations, context: Context, first: int, last: int, shift: Index
    ) -> Activations:
        layers = self.layers[first:last]
        packed = self.pack(params, layers, x, context.batch, context.keys_B)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *packed)

        def body(x: Activations, layer: tuple[LayerParams, jax.Array]) -> tuple[Activations, None]:
            return self._call(layers[0], layer[0], x, context, layer[1], scan=True, in_scan=True), None

        return jax.lax.scan(body, x, (stacked, jnp.arange(first, last) + shift))[0]

    def _call(
        self,
        layer: Layer,
        weights: Tree,
        x: Activations,
        context: Context,
        index: Index,
        *,
        scan: bool,
        in_scan: bool = False,
    ) -> Activations:
        def call(weights: LayerParams, x: Activations) -> Activations:
            mine = context.at(index)
            weights = self.read(layer, weights, x, mine.batch, mine.keys_B, packed=in_scan)
            if layer.num_applications > 1:
                return self._repeat(layer, weights, x, mine, scan=scan)
            return layer.apply(weights, self._changed(x, index), mine)

        if (policy := self.policy(layer)) is not None:
            call = jax.checkpoint(call, policy=policy, prevent_cse=not in_scan)
        return call(weights, x)

    def differentiated(self, params: Params) -> Params:
        """Return parameters in the form of which the gradient is computed."""
        return params

    def pack(
        self, params: Params, layers: Sequence[Layer], x: Activations, batch: Batch, keys_B: jax.Array | None
    ) -> list[Tree]:
        """Return what a scan over equal layers stacks of the parameters of each: by default in narrow dtypes."""
        return [self.narrowed(params[layer.name], layer, x, batch, keys_B) for layer in layers]

    def narrowed(
        self, weights: LayerParams, layer: Layer, x: Activations, batch: Batch, keys_B: jax.Array | None
    ) -> LayerParams:
        """Return the arrays of a layer in the dtypes in which it reads them."""
        shapes = self.shapes_read(layer, x, batch, keys_B)
        return jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), weights, shapes)

    def read(
        self, _layer: Layer, stored: Tree, _x: Activations, _batch: Batch, _keys: jax.Array | None, *, packed: bool
    ) -> LayerParams:
        """Return the arrays of a layer when it is computed. packed: whether `stored` is a result of `pack`."""
        weights: LayerParams = stored
        return weights

    def policy(self, layer: Layer) -> Any:
        """Return which values of a layer are saved for its backward pass, as `jax.checkpoint` takes it; None: all.

        In a group, the backward pass gathers positions again (Korthikanti et al., 2022, section 4.2.2).
        """
        if self.remat != "none" and layer.num_applications == 1:
            return REMAT_POLICIES[self.remat]
        return is_computed if self._group is not None else None

    def _repeat(
        self, layer: Layer, weights: LayerParams, x: Activations, context: Context, *, scan: bool
    ) -> Activations:
        """Apply a layer several times. Each application has dropout keys and a rematerialization of its own."""

        def apply(x: Activations, number: Index) -> tuple[Activations, None]:
            return layer.apply(weights, self._changed(x, number), context.at(number)), None

        if self.remat != "none":
            apply = jax.checkpoint(apply, policy=REMAT_POLICIES[self.remat])
        if scan:
            return jax.lax.scan(apply, x, jnp.arange(layer.num_applications))[0]
        for number in range(layer.num_applications):
            x, _ = apply(x, number)
        return x

    def _changed(self, x: Tree, index: Index) -> Tree:
        return x if self._change is None else self._change(x, index)

    def with_ties(self, params: Params, name: str) -> LayerParams:
        """Return the parameters of the layer `name`, with those that it shares with another layer."""
        tied = {tie.name: params[tie.source][tie.source_name] for tie in self.ties if tie.layer == name}
        return {**params[name], **(jax.lax.stop_gradient(tied) if self._is_untied else tied)}

    def _find_runs(self) -> Iterator[range]:
        tied = {tie.layer for tie in self.ties}
        start = 0
        for index in range(1, len(self.layers) + 1):
            ended = index == len(self.layers) or self.layers[index][1:] != self.layers[start][1:]
            if ended or self.layers[index].name in tied or self.layers[start].name in tied:
                yield range(start, index)
                start = index


def read_dtypes(function: Callable[..., Any], weights: Tree, *others: Any) -> Tree:
    """Return the dtype in which a function reads each array of `weights`.

    That is a 16-bit float dtype if all that the function does with the array is to cast it to that one, once. With
    several casts, the gradients of the results would be added in the narrower dtype. The arguments can be shapes.
    """
    traced = jax.make_jaxpr(function)(weights, *others).jaxpr
    uses: dict[int, list[Any]] = {id(variable): [] for variable in traced.invars}
    for equation in traced.eqns:
        is_cast = equation.primitive.name == "convert_element_type"
        for variable in equation.invars:
            uses.setdefault(id(variable), []).append(equation.params["new_dtype"] if is_cast else None)
    for variable in traced.outvars:
        uses.setdefault(id(variable), []).append(None)

    def dtype(leaf: Any, variable: Any) -> Any:
        match uses[id(variable)]:
            case [jnp.bfloat16 | jnp.float16 as narrow]:
                return narrow
        return leaf.dtype

    leaves, structure = jax.tree.flatten(weights)
    return jax.tree.unflatten(structure, map(dtype, leaves, traced.invars))
