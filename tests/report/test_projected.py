"""Figures of features as points: panels, colours, legends and their limits."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.report.layout import style_of
from fedsim.report.projection import Projection, draw_projection, plot_projection, projection_block


def projection_of(num_sets, projector="pca", cameras=3, clients=None):
    draw, images = np.random.default_rng(0), 6 * num_sets
    return Projection(
        projector, "global", "", [f"set{number}" for number in range(num_sets)], np.repeat(np.arange(num_sets), 6),
        [str(number) for number in range(images)], np.arange(images) % 6 < 2, np.arange(images) // 2,
        1 + np.arange(images) % cameras, draw.normal(size=(images, 2)), np.array([0.5, 0.25]),
        clients or [f"set{number}" for number in range(num_sets)], np.zeros((images, 4)),
    )  # fmt: skip


def drawn(projection, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("fedsim.report.projection.save_figure", lambda figure, *rest: figures.append(figure))
    draw_projection(projection, tmp_path / "a.png")
    return [axes for axes in figures[0].axes if axes.axison], figures[0]


def test_panels_colour_data_sets_then_cameras(monkeypatch, tmp_path):
    projection = projection_of(2)
    panels, figure = drawn(projection, monkeypatch, tmp_path)
    assert [axes.get_title() for axes in panels] == ["data set", "cameras of set0", "cameras of set1"]
    assert figure.get_suptitle() == "model global: 12 test images"
    for axes in panels:
        assert axes.get_xlabel() == "component 1, 50.0 % of the variance"
        assert axes.get_ylabel() == "component 2, 25.0 % of the variance"
        assert (axes.get_xlim(), axes.get_ylim()) == (panels[0].get_xlim(), panels[0].get_ylim())
        low, high = axes.get_xlim()
        assert ((projection.points[:, 0] > low) & (projection.points[:, 0] < high)).all()
    for number, points in enumerate(panels[0].collections):
        np.testing.assert_array_equal(points.get_offsets(), projection.points[projection.of_set == number])
    others, *by_camera = panels[2].collections
    np.testing.assert_array_equal(others.get_offsets(), projection.points[projection.of_set == 0])
    for camera, points in enumerate(by_camera, start=1):
        chosen = (projection.of_set == 1) & (projection.cameras == camera)
        np.testing.assert_array_equal(points.get_offsets(), projection.points[chosen])
        np.testing.assert_array_equal(points.get_facecolor()[0, :3], to_rgb(style_of(camera - 1).colour))
    assert [text.get_text() for text in panels[2].get_legend().get_texts()] == ["c1", "c2", "c3"]


def test_one_data_set_has_one_panel_of_cameras(monkeypatch, tmp_path):
    [axes], _ = drawn(projection_of(1, "tsne"), monkeypatch, tmp_path)
    assert axes.get_title() == "cameras of set0"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("t-SNE, axis 1", "t-SNE, axis 2")


def test_many_data_sets_have_a_bounded_figure(monkeypatch, tmp_path):
    panels, figure = drawn(projection_of(30), monkeypatch, tmp_path)
    assert len(panels) == 12
    assert figure.get_suptitle().endswith("cameras of the first 11")
    [legend] = figure.legends  # below its panel it would leave a gap
    assert [text.get_text() for text in legend.get_texts()] == projection_of(30).sets
    assert panels[0].get_legend() is None
    colours = [handle.get_facecolor()[0, :3].tolist() for handle in legend.legend_handles]
    assert colours == [[*to_rgb(style_of(number).colour)] for number in range(30)]
    panels, figure = drawn(projection_of(11), monkeypatch, tmp_path)
    assert len(panels) == 12
    assert "first" not in figure.get_suptitle()


def test_equal_points_and_odd_names_can_be_drawn(tmp_path):
    projection = projection_of(2)
    projection.points[:] = 0
    projection.sets[:] = ["$x_1$ \n" + "long " * 20, "_hidden"]
    draw_projection(projection, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert np.asarray(picture.convert("L")).min() < 100
    axes = Figure().subplots()
    plot_projection(axes, projection)
    first, second = (text.get_text() for text in axes.get_legend().get_texts())
    assert (first[:5], first[-9:], len(first), second) == ("$x_1$", "ong long ", 28, "_hidden")
    assert "\n" not in first
    assert "long" in projection_block(projection, "a").text("table")
    with pytest.raises(DataError, match="cannot write the figure"):
        draw_projection(projection, tmp_path / "a.xyz")


@pytest.mark.parametrize(
    ("clients", "titles"),
    [
        (["a", "a", "b", ""], ["data set", "client", "cameras of set0"]),
        (["a", "b", "c", ""], ["data set", "cameras of set0"]),  # as the data sets
        (["", "", "", ""], ["data set", "cameras of set0"]),
        (["a", "a", "a", "a"], ["data set", "cameras of set0"]),
    ],
)
def test_a_panel_by_client_stands_where_clients_are_not_the_data_sets(monkeypatch, tmp_path, clients, titles):
    projection = projection_of(4, clients=clients)
    panels, _ = drawn(projection, monkeypatch, tmp_path)
    assert [axes.get_title() for axes in panels][: len(titles)] == titles
    if "client" in titles:
        others, *by_client = panels[1].collections
        np.testing.assert_array_equal(others.get_offsets(), projection.points[projection.of_set == 3])
        np.testing.assert_array_equal(by_client[0].get_offsets(), projection.points[projection.of_set < 2])
        np.testing.assert_array_equal(by_client[1].get_offsets(), projection.points[projection.of_set == 2])
        assert [text.get_text() for text in panels[1].get_legend().get_texts()] == ["a", "b"]
    many, figure = drawn(projection_of(12, clients=[*"aabbccddeeff"]), monkeypatch, tmp_path)
    assert len(many) == 12
    assert figure.get_suptitle().endswith("cameras of the first 10")
