"""The page of engine, trainer and scorers: medians, and ratios within a step."""

from benchmarks import compute

NOW = {
    "generation: engine, a step at once": [1.0, 2.0, 4.0],
    "generation: engine, prompts one by one": [2.0, 4.0, 8.0],
    "generation: transformers": [3.0, 4.0, 4.0],
    "generation: matrices": [0.5, 0.5, 1.0],
    "training: trainer": [2.0, 2.0, 2.0],
    "training: transformers, padded": [3.0, 1.0, 3.0],
    "training: transformers, as many tokens": [1.0, 1.5, 2.0],
}


def test_ratios_are_taken_within_a_step() -> None:
    before = {name: [2 * value for value in values] for name, values in NOW.items()}
    rows = {row["side"]: row for row in compute.rows_of({"now": NOW, "before": before})}
    assert rows["transformers"] == {
        "part": "generation",
        "side": "transformers",
        "ms a sample": "4.000",
        "of ours": "2.00",
        "before": "",
        "now / before": "",
    }
    assert rows["engine, prompts one by one"]["now / before"] == "0.50"
    assert rows["trainer"]["before"] == "4.000"
    assert "before" not in compute.rows_of({"now": NOW})[0]


def test_conclusion_names_each_task() -> None:
    assert compute.conclusion_of({"quickstart": compute.rows_of({"now": NOW})}) == (
        "- quickstart: generation takes 25% of its time in the matrices, and transformers 2.00 times as long as "
        "the engine; a padded train step takes 1.50 times as long as ours, and one of as many tokens 0.75 times."
    )
