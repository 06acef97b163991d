"""Tests user-defined models: modules on PYTHONPATH with the same `build` function as the models in jaxpar."""

import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.errors import UserError
from jaxpar.models import build
from tests.docs.test_pages import blocks
from tests.models.small import BATCH, CLASSES, CPU, TEXT, dropout_keys, fast_jit, make_batch, make_params, small_config


def example() -> str:
    """Return the example in docs/howto/model.md, so that the tests run it."""
    text = (Path(__file__).parents[2] / "docs" / "howto" / "model.md").read_text()
    return text.split("```python\n")[1].split("```")[0]


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "my_package"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)  # of another test
    return package


def test_example_of_the_docs(own_package: Path) -> None:
    (own_package / "my_model.py").write_text(example())
    outputs: list[jax.Array] = []
    for scan in (True, False):
        config = small_config("my_package.my_model", "classification", num_layers=3, hidden_size=8, scan_layers=scan)
        model = build(config, TEXT, CPU)
        assert [layer.name for layer in model.layers] == ["embed", "block_0", "block_1", "block_2", "head"]
        assert model.runs == (range(0, 1), range(1, 4), range(4, 5))
        params, batch = make_params(model), make_batch("bert", "classification")
        apply = fast_jit(model.apply)
        outputs += [apply(params, batch), apply(params, batch, dropout_keys())]
        batch["inputs"] = np.where(batch["mask"], batch["inputs"], 3)
        np.testing.assert_allclose(apply(params, batch), outputs[-2], rtol=1e-6)
    assert outputs[0].shape == (BATCH, CLASSES)
    np.testing.assert_allclose(outputs[0], outputs[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[1], outputs[3], rtol=1e-5, atol=1e-6)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_the_tutorial_trains_its_model(
    own_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program is the one of the tutorial, on synthetic texts instead of the definitions.

    The README has the same model.
    """
    *_, module, program = (text for language, text in blocks("docs/tutorials/train.md") if language == "python")
    assert ("python", module) in blocks("README.md")
    (own_package / "my_model.py").write_text(module)
    config = jaxpar.load_config("configs/quickstart.py")
    config.data.source, config.batch_size, config.strategy = "synthetic", 64, "single"
    config.mesh.virtual_cpu_devices = 0
    monkeypatch.setattr(jaxpar, "load_config", lambda _: config)
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int32
        exec(compile(program, "train.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "model     my_package.my_model, layers embed, head; " in printed
    assert float(printed.split()[-1]) > 0.5  # of 8 classes


def test_bug_in_the_users_module_is_not_hidden(own_package: Path) -> None:
    (own_package / "broken.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        build(small_config("my_package.broken", "classification"), TEXT, CPU)


def test_parameters_must_be_float32(own_package: Path) -> None:
    source = example() + textwrap.dedent(
        """
        import jax.numpy as jnp

        def build(config, info):
            def make(rngs):
                return nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=rngs)

            return Model({"first": make, "head": make})
        """
    )
    (own_package / "narrow.py").write_text(source)
    message = (
        r"config.model.name is 'my_package.narrow', whose parameter \['first'\]\['bias'\] is bfloat16; it must be f"
    )
    with pytest.raises(UserError, match=message):
        build(small_config("my_package.narrow", "classification"), TEXT, CPU)


def test_build_must_return_a_model(own_package: Path) -> None:
    source = """
        def build(config, info):
            return None
    """
    (own_package / "nothing.py").write_text(textwrap.dedent(source))
    with pytest.raises(UserError, match=r"my_package.nothing.*NoneType.*jaxpar.models.Model"):
        build(small_config("my_package.nothing", "classification"), TEXT, CPU)
