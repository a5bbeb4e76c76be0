"""Models on a mesh of forced host devices equal the unsharded ones, and their weights really are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from labkit.converters import load_model
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.models import get_family, read_config
from labkit.scale.mesh import build_mesh


def test_the_product_is_strict():
    with pytest.raises(InputError, match="needs 4 devices, and there are 8"):
        build_mesh(fsdp=2, tensor=2)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tiny:llama", "tiny:qwen3", "tiny:gemma2")]


@pytest.mark.parametrize("name", ["tiny:qwen3_moe?num_hidden_layers=2", *SLOW])
def test_sharded_forward_equals_the_unsharded_one(name):
    source = open_source(name)
    family = get_family(source.config.model_type)
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    alone, sharded = load_model(source)[0], load_model(source, mesh=mesh)[0]
    assert sharded.mesh is mesh
    tokens = jnp.asarray(np.random.RandomState(0).randint(0, config.vocab_size, (2, 9)), jnp.int32)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    want = np.asarray(forward(alone, tokens))
    with jax.sharding.set_mesh(mesh):
        got = np.asarray(forward(sharded, tokens))
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    weights = 0
    for path, leaf in nnx.to_flat_state(nnx.state(sharded, nnx.Param)):
        value, stacked = leaf.get_raw_value(), str(path[0]) == "layers"
        shape = value.shape[1:] if stacked else value.shape
        if len(shape) >= 2 and np.prod(shape) >= 256:
            assert value.sharding.is_equivalent_to(NamedSharding(mesh, leaf.get_metadata("out_sharding")), value.ndim), path
            assert not value.sharding.is_fully_replicated, path
            weights += 1
    assert weights >= 7


def test_abstract_and_eager_construction_give_one_state_tree():
    source = open_source("tiny:llama?num_hidden_layers=2")
    family = get_family("llama")
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    eager = family.create(config, rngs=nnx.Rngs(3), mesh=mesh)
    abstract = nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(3), mesh=mesh))
    other = nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(3), mesh=build_mesh(fsdp=4, devices=jax.devices()[:4])))

    def tree(model):
        return {
            path: (leaf.get_raw_value().shape, leaf.get_raw_value().dtype, leaf.get_metadata("out_sharding"))
            for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
        }

    assert tree(eager) == tree(abstract)
    assert eager.mesh is abstract.mesh is mesh and nnx.split(eager)[0] != nnx.split(other)[0]
