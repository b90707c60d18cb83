"""reporting/plots.py: the contents of the plots. Texts are not cut off and do not overlap."""
import math
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
import scipy.stats
from helpers.made_up_runs import DATA, STUDIES, run_of, runs_of, study_of
from helpers.reports import tables_of, write

from timm_ortho import CONNECTIONS
from timm_ortho.lab.reporting import plots, published, report
from timm_ortho.lab.reporting.plots import STYLES, Panel, lines_chart, style

RESULTS = Path(__file__).parents[2] / "model_cards" / "results" / "studies"
COMMITTED = ["accuracy-digits-small", "learning_rate-digits-small", "hybrid-digits-small"]


def drawn(study, runs):
    """Return the drawn matplotlib figure of each plot of a report, by name."""
    return {drawing.name: drawing.draw() for drawing in drawings(study, runs)}


def drawings(study, runs):
    part = report.Part.of(study, runs, [])
    of_layout = plots.drawings(plots.Scene(part.runs, part.layout, part.recorded))
    return [*of_layout, *plots.forest(part.entries)]


def extents(artists):
    return [artist.get_window_extent() for artist in artists if artist.get_visible() and getattr(artist, "_text", True)]


def assert_fits(name, figure):
    """Check that legends, titles and labels of x axes are inside the figure.

    Also check that neighbouring titles, and neighbouring tick labels that are not rotated, do not overlap.
    """
    figure.draw_without_rendering()
    width, height = figure.bbox.width, figure.bbox.height
    texts = [text for axes in figure.axes for text in (axes.title, axes._left_title, axes.xaxis.label)]
    for box in extents([*figure.legends, *texts]):
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= width + 1, name
        assert box.y1 <= height + 1, name
    for axes in figure.axes:
        low, high = sorted(axes.get_xlim())
        labels = [label for label in axes.get_xticklabels()
                  if low <= label.get_position()[0] <= high and label.get_text() and not label.get_rotation()]
        boxes = sorted(extents(labels), key=lambda box: box.x0)
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes)), name
    titles = extents([axes._left_title for axes in figure.axes])
    assert not any(one.overlaps(other) for one, other in combinations(titles, 2)), name


@pytest.mark.parametrize("name", ["dynamics", "layer_pattern", "learning_rate", "compare"])
def test_nothing_is_cut_off(name):
    found = drawn(study_of(name), runs_of(name))
    assert found
    for figure_name, figure in found.items():
        assert_fits(figure_name, figure)
        labels = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
        assert len(figure.legends) == bool(labels)


def test_every_plot_has_data():
    for name in STUDIES:
        part = report.Part.of(study_of(name), runs_of(name), [])
        scene = plots.Scene(part.runs, part.layout, part.recorded)
        empty = [plot for plot, options in part.layout.plot_options() if not [*plots.DRAWINGS[plot](scene, **options)]]
        assert not empty, f"{name}: the layout plots recorded metrics, so the study needs the key `record`"


def test_text_of_other_people_is_plain(tmp_path):
    """A control character would make the page invalid XML, and matplotlib's warning about it an error."""
    evil = "x\0\x1b[2J\u202e\ny"
    study = study_of("compare", title=evil, command=f"a\n\n{evil}", report={"labels": {"connection": {"linear": evil}}},
                     changed=["~~~", "# a", "- b", "1. c", "---", "    d"])
    printed = write(study, [run_of("linear", 0), run_of("feature", 0)], ["run (failed: a\nb)"], tmp_path)
    assert tables_of(tmp_path)
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "\n\n".join([r"\~\~\~", r"\# a", r"\- b", r"1\. c", r"\---", "d", "## Every run"]) in markdown
    svgs = [plot.read_text(encoding="utf-8") for plot in tmp_path.glob("figures/*.svg")]
    for text in (printed, markdown, (tmp_path / "report.html").read_text(encoding="utf-8"), "".join(svgs)):
        assert r"x\x00\x1b[2J\u202e y" in text
        assert text.replace("\n", "").isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMITTED)
def test_nothing_is_cut_off_in_plots_of_published_studies(name):
    study, runs, _ = published.read(RESULTS / name)
    for figure_name, figure in drawn(study, runs).items():
        assert_fits(figure_name, figure)


def test_every_learning_rate_of_the_paper_fits():
    rates = [5e-4, 6e-4, 7e-4, 8e-4, 9e-4, 1e-3, 2e-3, 5e-3]
    runs = [run_of(connection, 0, {"lr": rate}) for rate in rates for connection in ("linear", "feature")]
    found = drawn(study_of("learning_rate", axes={"lr": rates}), runs)["learning_rate"]
    assert_fits("learning_rate", found)
    assert [label.get_text() for label in found.axes[0].get_xticklabels()] == ["5e-4", "8e-4", "2e-3", "5e-3"]


def test_long_names_make_more_rows_of_the_legend():
    names = [f"a rather long name of a line, number {index}" for index in range(8)]
    figure = lines_chart([Panel("title", {name: ({"color": "k"}, [0, 1], [[1.0, 2.0]]) for name in names}, "epoch")])
    assert_fits("legend", figure)
    assert len(figure.legends[0].get_texts()) == 8


def test_lines_are_means_and_shades_deviations_with_gaps():
    curves = [[1.0, None, math.nan, 4.0], [3.0, 5.0, None, None]]
    axes = lines_chart([Panel("", {"a": ({"color": "k"}, [1, 2, 3, 4], curves)}, "epoch")]).axes[0]
    x, y = axes.lines[0].get_data()
    assert list(x) == [1, 2, 3, 4]
    assert [value for value in y if not math.isnan(value)] == [2.0, 5.0, 4.0]
    assert math.isnan(y[2])
    shade = axes.collections[0].get_paths()[0].vertices
    assert (shade[:, 1].min(), shade[:, 1].max()) == pytest.approx((2.0 - math.sqrt(2.0), 5.0))


def test_shades_are_drawn_where_they_do_not_overlap():
    """The lines are 0.2, 4 and 6 apart at x = 0, 1 and 2, with deviations of 0.7 above and below each."""
    curves = {"low": [[0, 0, 0], [1, 1, 1]], "high": [[0.2, 4, 6], [1.2, 5, 7]]}
    panel = Panel("", {name: ({"color": "k"}, [0, 1, 2], of_line) for name, of_line in curves.items()}, "epoch")
    for shade in lines_chart([panel]).axes[0].collections:
        [path] = shade.get_paths()
        assert (path.vertices[:, 0].min(), path.vertices[:, 0].max()) == (1, 2)


def test_labels_are_not_formulas():
    labels = {"titles": {"connection": r"cost in $ and \foo $"}, "plots": [{"points": {"x": "connection"}}]}
    found = drawings(study_of("mine", report=labels), [run_of("linear", 0)])
    assert r"cost in $ and \foo $" in next(picture.svg for picture in found if picture.name == "connection")


@pytest.mark.parametrize("points", [False, True])
def test_the_largest_numbers_of_files_are_drawn(points):
    """A step may be the product of two counts, which exceeds 64 bits."""
    panel = Panel("", {"a": ({"color": "k"}, [0, 2**106], [[-1e100, 1e100], [0.0, 1e100]])}, "step", points=points)
    lines_chart([panel]).draw_without_rendering()


def test_curves_of_runs_with_different_epochs_are_drawn_at_their_epochs():
    whole, part = (run_of("linear", seed, top1=90.0 + 2 * seed) for seed in (0, 1))  # epochs 1 to 3
    runs = [whole, {**part, "history": part["history"][1:2]}]
    line = drawn(study_of("compare"), runs)["training"].axes[1].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [70.0, 81.0, 90.0])


def test_loss_by_step_and_accuracy_by_epoch():
    runs = [run_of(connection, seed, batch_size=8) for connection in ("linear", "feature") for seed in (0, 1)]
    study = study_of("compare", data={**DATA, "train": 83})
    loss, top1 = drawn(study, runs)["training"].axes
    assert (loss.get_xlabel(), list(loss.lines[0].get_xdata())) == ("training step", [10, 20, 30])
    assert (top1.get_xlabel(), list(top1.lines[0].get_xdata())) == ("epoch", [1, 2, 3])
    mixed = [{**run, "batch_size": 8 * (run["seed"] + 1)} for run in runs]  # no common number of steps
    assert drawn(study, mixed)["training"].axes[0].get_xlabel() == "epoch"


def test_training_is_drawn_in_every_report():
    """Each row has the runs that are compared with one baseline."""
    titles = [axes.get_title(loc="left") for axes in drawn(study_of("learning_rate"), runs_of("learning_rate"))[
        "training"].axes]
    rates = [title.replace("\n", " ").partition(":")[0] for title in titles]
    assert rates == ["learning rate = 1e-3"] * 2 + ["learning rate = 5e-3"] * 2
    axes = drawn(study_of("layer_pattern"), runs_of("layer_pattern"))["training"].axes
    assert [line.get_label() for line in axes[1].lines] == ["blocks = none", "blocks = 0,1", "blocks = all"]


def test_no_two_lines_of_a_panel_look_alike():
    """Each connection has its own baseline, so it has its own panels. Runs of one epoch are markers."""
    values = {"prob": [0.0, 0.5, 1.0], "where": ["all", "first", "mlp"]}
    study = study_of("mine", axes=values, baseline={"prob": 0.0}, report={"measures": ["top1"]})
    runs = [run_of(connection, 0, dict(zip(values, cell, strict=True)), epochs=1)
            for cell in product(*values.values()) for connection in ("feature", "global")]
    for figure in (found := drawn(study, runs))["training"], found["profile"]:
        assert len({axes.get_title(loc="left").replace("\n", " ").partition(":")[0] for axes in figure.axes}) == 6
        for axes in figure.axes:
            assert [line.get_label() for line in axes.lines] == ["prob = 0", "prob = 0.5", "prob = 1"]
            assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}) == 3
    assert len({line.get_marker() for line in found["training"].axes[0].lines}) == 3


def test_sites_have_the_labels_of_their_model():
    """Models of one kind share a panel. A model with other sites has its own panels."""
    def renamed(run, kinds):
        sites = [{**site, "kind": kind} for site, kind in zip(run["probe"][-1]["sites"], kinds, strict=True)]
        return {**run, "probe": [{"epochs_done": 3, "sites": sites}]}

    archs = {"vit": ["attention", "mlp"] * 2, "other": ["attention", "mlp"] * 2, "conv": ["conv"] * 4}
    runs = [renamed(run_of("linear", 0, {"arch": arch}), kinds) for arch, kinds in archs.items()]
    study = study_of("mine", axes={"arch": list(archs)}, baseline={"arch": "vit"})
    by_arch = {}
    for axes in drawn(study, runs)["profile"].axes:
        title = axes.get_title(loc="left").replace("\n", " ").partition(":")[0]
        by_arch[title] = [label.get_text() for label in axes.get_xticklabels()]
    assert by_arch == {"arch = vit, arch = other": ["0 attention", "0 mlp", "1 attention", "1 mlp"],
                       "arch = conv": ["0 conv", "0 conv", "1 conv", "1 conv"]}


def test_a_panel_of_diverged_runs_is_drawn():
    runs = [run_of(connection, 0, {"lr": lr}) for lr in (1e-3, 1e30) for connection in ("linear", "feature")]
    for run in runs[2:]:
        run["history"] = [{**row, "train_loss": None} for row in run["history"]]
    study = study_of("mine", axes={"lr": [1e-3, 1e30]})
    assert_fits("training", drawn(study, runs)["training"])


def test_captions_say_what_is_drawn():
    captions = {drawing.name: drawing.caption for drawing in drawings(study_of("compare"), runs_of("compare"))}
    assert [name for name, caption in captions.items() if "x ax" not in caption] == [], "name the x axis in the caption"
    told = "Lines: means over 3 runs. Shaded: one standard deviation, where shades do not overlap."
    assert told in captions["training"]
    assert "paper" not in " ".join(captions.values())
    one = {drawing.name: drawing.caption for drawing in drawings(study_of("compare"), runs_of("compare", seeds=[0]))}
    assert "Each line is one run." in one["training"]
    mixed = drawings(study_of("compare"), runs_of("compare")[:-1])
    assert "Lines: means over up to 3 runs." in mixed[0].caption
    with_paper = {drawing.name: drawing.caption for drawing in drawings(study_of("accuracy"), runs_of("accuracy"))}
    assert "diamonds" in with_paper["differences"]


def test_differences_without_variance_have_a_point_without_a_bar():
    runs = [run_of(connection, seed, {"index": index}, epochs=1,
                   top1=90.0 + seed + (connection == "feature") * (1.0 + index * seed))
            for index in range(2) for connection in ("linear", "feature") for seed in range(2)]
    study = study_of("mine", axes={"index": [0, 1]}, report={"measures": ["top1"]})
    drawing = drawings(study, runs)[-1]
    axes = drawing.draw().axes[0]
    [paired] = axes.containers
    bars = [segment for segment in paired.lines[2][0].get_segments() if len(segment)]
    assert [list(bar[:, 1]) for bar in bars] == [[1, 1]]
    assert list(paired.lines[0].get_xdata()) == [1.0, 1.5]
    assert [point[0] for point in axes.collections[-1].get_offsets().tolist()] == [1.0, 1.0, 1.0, 2.0]  # each seed
    assert "A marker without a bar has no interval." in drawing.caption


def test_an_axis_of_equal_accuracies_shows_no_rounding_errors():
    runs = [run_of(connection, seed, top1=90.1 + 0.7 * seed, epochs=1)
            for connection in ("linear", "feature", "global") for seed in range(3)]
    study = study_of("mine", report={"measures": ["top1"]})
    low, high = drawings(study, runs)[-1].draw().axes[0].get_xlim()
    assert high - low > 0.01


def test_a_single_run_has_no_bar():
    figure = drawn(study_of("layer_pattern"), runs_of("layer_pattern", seeds=[0]))["layers"]
    bars = [bar for container in figure.axes[0].containers for bar in container.lines[2][0].get_segments()]
    assert bars
    assert not any(map(len, bars))


def test_switches_are_marked():
    runs = [{**run, "switch_epoch": 2} for run in runs_of("switch_kept")]
    axes = drawn(study_of("switch_kept"), runs)["switch"].axes[0]
    assert list(axes.lines[-1].get_xdata()) == [2, 2]
    assert [line.get_label() for line in axes.lines[:2]] == ["Linear → Linear", "Linear → Orthogonal"]


def test_transitions_are_marked():
    found = drawn(study_of("dynamics"), runs_of("dynamics"))["stream_mlp"]
    assert [list(axes.lines[-1].get_xdata()) for axes in found.axes] == [[30, 30]] * 2


def test_coefficients_are_drawn_if_they_are_recorded():
    found = {drawing.name: drawing for drawing in drawings(study_of("dynamics"), runs_of("dynamics"))}
    linear, orthogonal = found["s_added_mlp"].draw().axes[0].lines
    assert set(orthogonal.get_ydata()) == {0.0} != set(linear.get_ydata())
    assert "s = <x, f> / (|x|² + ε) is the signed coefficient" in found["s_mlp"].caption
    assert "transition point" not in found["s_mlp"].caption
    assert [list(line.get_ydata()) for line in found["cosine_mlp"].draw().axes[0].lines if line.get_linewidth() == 0.9
            ] == [[0, 0]]
    old = [{**run, "dynamics": [{key: value for key, value in row.items() if key not in ("s", "s_added")}
                                for row in run["dynamics"]]} for run in runs_of("dynamics")]
    assert found.keys() - drawn(study_of("dynamics"), old).keys() == {
        "s_mlp", "s_attention", "s_added_mlp", "s_added_attention"}


def test_forest_has_the_intervals_and_the_papers_effects():
    runs = [run_of(connection, seed, {"model": model}, top1=90.0 + seed + gain * (connection == "feature"), epochs=1)
            for model, gains in (("vit_s", (1.0, 2.0)), ("resnetv2_18", (0.5, 0.0))) for seed, gain in enumerate(gains)
            for connection in ("linear", "feature")]
    figure = drawn(study_of("accuracy", dataset="torch/cifar10", seeds=[0, 1]), runs)["differences"]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "ViT-S, Orthogonal-F, CIFAR-10", "ResNetV2-18, Orthogonal-F, CIFAR-10"]
    [paired] = axes.containers
    assert list(paired.lines[0].get_xdata()) == pytest.approx([1.5, 0.25])
    half = scipy.stats.t.ppf(0.975, 1) * 0.5  # the standard error of the differences 1.0 and 2.0 is 0.5
    assert [end[0] for end in paired.lines[2][0].get_segments()[0]] == pytest.approx([1.5 - half, 1.5 + half])
    assert axes.collections[-1].get_offsets().tolist() == [[pytest.approx(0.79), 0.0], [pytest.approx(0.2), 1.0]]
    assert "differences" not in drawn(study_of("accuracy"), runs[:1])


def test_points_are_runs_with_mean_and_deviation():
    figure = drawn(study_of("layer_pattern"), runs_of("layer_pattern"))["layers"]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "0,1", "all"]
    linear, feature = axes.containers
    assert (list(linear.lines[0].get_ydata()), list(feature.lines[0].get_ydata())) == ([81.0], [82.0, 83.0])
    assert sorted(point[1] for point in axes.collections[1].get_offsets().tolist()) == [80.0, 81.0, 82.0]


def test_stream_is_that_of_the_probes():
    found = drawn(study_of("compare"), runs_of("compare"))
    norm, cosine = found["profile"].axes
    assert list(norm.lines[0].get_ydata()) == [math.sqrt(7.0)] * 4  # from the probe after epoch 3, the last
    assert [label.get_text() for label in norm.get_xticklabels()] == ["0 attention", "0 mlp", "1 attention", "1 mlp"]
    assert all(math.isnan(value) for value in cosine.lines[1].get_ydata())


def test_colours_and_markers_of_connections_differ():
    assert [name for name in CONNECTIONS if name not in STYLES] == []
    for key in ("color", "linestyle", "marker"):
        assert len({STYLES[name][key] for name in CONNECTIONS}) == len(CONNECTIONS), (
            f"two connections have the same {key}; a line style can be a dash pattern such as (0, (3, 1, 1, 1))")
    names = [f"series {index}" for index in range(28)]
    assert len({tuple(style(name, names)[key] for key in ("color", "linestyle")) for name in names}) == 28
