"""The picture of axes shows the plan: which array is held how, and what travels between them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from matplotlib.colors import to_hex
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import inspect
from zeroxla.models import GPT, Mixtral
from zeroxla.split.axis_report import in_words

pytestmark = pytest.mark.usefixtures("quick_compilation")


def step_of(model, length=1024, **axes):
    """Return a step that has been given the shapes of a batch, nothing else."""
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:4], **axes)
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1))
    step.abstract_state({"tokens": jax.ShapeDtypeStruct((4, length + 1), jnp.int32)})
    return step


def gpt(**options):
    return GPT(**{"vocab": 50304, "layers": 3, **options})


def texts(axes):
    return [text.get_text() for text in axes.texts]


def boxes(axes):
    """Return (holding, width, colour) of each filled box."""
    named = [p for p in axes.patches if p.get_label()]
    return [(p.get_label(), p.get_width(), to_hex(p.get_facecolor())) for p in named]


def arrows(axes):
    """Return the collectives of the arrows, and what stands behind them."""
    names = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
    return [text for text in texts(axes) if text.startswith(names)]


@pytest.mark.slow
def test_tensor_shows_megatron_with_sequence_parallelism(tmp_path):
    step = step_of(gpt(), tensor=4)
    figure = inspect.plot_axes(step, path=tmp_path / "axes.png")
    (axes,) = figure.axes
    (report,) = step.describe().axes
    received = inspect.format_bytes(report.received)
    assert axes.get_title(loc="left") == f"tensor=4: a device receives {received} in a micro-batch"

    share = 4 * 1024 * 768 * 4 * 3 / 4  # of an array of the residual, what a device lacks
    moved = inspect.format_bytes(share)
    gather = f"all-gather {moved}; backward reduce-scatter {moved}"
    scatter = f"reduce-scatter {moved}; backward all-gather {moved}"
    assert arrows(axes) == [scatter, gather, scatter, gather, scatter, gather]
    assert texts(axes).count("3 times") == 1
    for name in ("attn/c_attn", "h/ln_1", "mlp/c_fc", "GPT/wte"):
        assert name in texts(axes)
    # Columns of the first product, rows of the second; norms are split along the sequence.
    for shape in ("768 x 2304/4", "768/4 x 768", "4 x 1024/4 x 768", "sum of 4: 4 x 1024 x 768"):
        assert shape in texts(axes)

    drawn = [row.held for row in report.scopes]
    drawn += [row.leaf.held for row in report.scopes if row.leaf]
    assert sorted(held for held, _, _ in boxes(axes)) == sorted(map(in_words, drawn))
    assert len({color for _, _, color in boxes(axes)}) == len({held for held, _, _ in boxes(axes)})
    whole = max(width for _, width, _ in boxes(axes))
    together = inspect.plot_axes([report, report])
    assert [texts(one) for one in together.axes] == [texts(axes)] * 2
    parts = {width for held, width, _ in boxes(axes) if held.startswith("part")}
    assert whole / 4 in parts
    assert (tmp_path / "axes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_context_shows_ulysses():
    (axes,) = inspect.plot_axes(step_of(gpt(), context=4).describe()).axes
    to_heads, from_heads = arrows(axes)[:2]
    assert to_heads.startswith("all-to-all 7.08 MB; backward all-to-all")
    assert from_heads.startswith("all-to-all 2.36 MB; backward all-to-all")
    assert "4 x 1024 x 768/4" in texts(axes)


@pytest.mark.slow
def test_experts_show_tokens_on_their_way_and_leaves_have_names():
    """Modules of nnx name no scopes: rows have the names of leaves."""
    model = Mixtral.tiny(width=512, hidden=1792, heads=8)
    (axes,) = inspect.plot_axes(step_of(model, expert=4)).axes
    assert [text.split(" ")[0] for text in arrows(axes)[:2]] == ["all-to-all"] * 2
    assert "experts/gate_proj" in texts(axes)
    assert "self_attn/q_proj" in texts(axes)
    assert "8/4 x 512 x 1792" in texts(axes)


@pytest.mark.slow
def test_blocks_that_are_written_out_are_shown_once_and_axes_side_by_side():
    step = step_of(gpt(scan=False, layers=2), context=2, tensor=2)
    reports = step.describe().axes
    figure = inspect.plot_axes(reports)
    assert [a.get_title(loc="left").split("=")[0] for a in figure.axes] == ["context", "tensor"]
    first = texts(figure.axes[0])
    assert "2 times" in first
    assert "h_0/ln_1" in first
    assert "h_1/ln_1" not in first
    (alone,) = inspect.plot_axes(reports[1]).axes
    assert texts(alone) == texts(figure.axes[1])


@pytest.mark.slow
def test_a_block_that_is_written_out_is_shown_once():
    step = step_of(GPT.tiny(scan=False, layers=2), length=32, context=2)
    first = texts(inspect.plot_axes(step).axes[0])
    assert "2 times" in first
    assert "h_0/ln_1" in first
    assert "h_1/ln_1" not in first


def test_a_step_without_axes_has_no_picture():
    step = step_of(GPT.tiny(), length=32)
    with pytest.raises(ValueError, match="no axis splits the work on one row here; give a step"):
        inspect.plot_axes(step)
